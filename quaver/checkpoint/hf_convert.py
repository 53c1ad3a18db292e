"""From a run's tensors to those of a Hugging Face file: names, experts and dtypes, nothing lost on the way.

The architecture itself, built on meta, says which tensors there are, of which shapes, and which ones transformers
keeps in FP32. May import: low_precision, this room's `files`, `hf_layout` and `hf_match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.hf_layout import expert_pieces, is_fused, other_layouts, piece_of, shape_fault
from quaver.checkpoint.hf_match import dropped_because
from quaver.low_precision import MasterWeight

DTYPES = (torch.float32, torch.bfloat16)


class Conversion:
    """Holds what is handed in against the architecture, and turns it into what is written.

    Args:
        model: the architecture on meta, in the dtype of the export.
        config: as it is written.
        experts: `per_expert` or `fused`.

    Attributes:
        dropped: FQN -> why it is not written.
        kept_fp32: keys written as FP32 although the export's dtype is smaller.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig, experts: str) -> None:
        self._config, self._split = config, experts == "per_expert"
        self._wanted = model.state_dict()  # on meta: shapes, and the dtypes that transformers would have
        self._whole = set(other_layouts(model)) if self._split else set()
        self.dropped: dict[str, str] = {}
        self.kept_fp32: list[str] = []

    def converted(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(key, contiguous tensor of its own memory) of everything that is written.

        Raises:
            CheckpointError: a missing, unknown, doubled or wrongly shaped tensor, one of another dtype than FP32 and
                BF16, values that are not finite, or experts that cannot be taken apart; by name.
        """
        seen: set[str] = set()
        for fqn, given in named_tensors:
            if fqn in seen:
                raise cannot_start("the tensor was given twice", where=fqn)
            seen.add(fqn)
            wanted = self._wanted.get(fqn)
            if wanted is None:
                self._drop(fqn)
            else:
                yield from self._written(fqn, given, wanted)
            del given  # before the next one is asked for
        missing = [fqn for fqn in self._wanted if fqn not in seen]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise cannot_start(
                f"the model has {', '.join(missing[:3])}{more}, which were not given",
                where=type(self._config).__name__,
                remedy="export the whole model",
            )

    def _written(
        self, fqn: str, given: torch.Tensor, wanted: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for key, piece in self._pieces(fqn, _checked(fqn, given, tuple(wanted.shape))):
            written = piece.to(wanted.dtype, copy=True, memory_format=torch.contiguous_format)
            if not torch.isfinite(written).all():
                raise cannot_start(
                    f"the tensor holds values that are not finite in {written.dtype}",
                    where=key if key == fqn else f"{key}, of {fqn}",
                    remedy="export an earlier checkpoint of the run",
                )
            if written.dtype is torch.float32 and self._config.dtype is not torch.float32:
                self.kept_fp32.append(key)
            yield key, written

    def _drop(self, fqn: str) -> None:
        reason = dropped_because(fqn, self._config)
        if reason is None:
            raise cannot_start(
                "the architecture has no such tensor",
                where=f"{fqn}, {type(self._config).__name__}",
                remedy="export with the config that the model was built from",
            )
        self.dropped[fqn] = reason

    def _pieces(self, fqn: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._split or not is_fused(fqn):
            yield fqn, tensor
            return
        fault = shape_fault(fqn, tensor.shape)
        if fault is None and fqn in self._whole:
            fault = "this architecture lays its experts out in another way"
        if fault is not None:
            raise cannot_start(
                f"the experts cannot be written one by one: {fault}",
                where=f"{fqn} {tuple(tensor.shape)}",
                remedy="export with experts: fused",
            )
        for piece in expert_pieces(fqn, tensor.shape[0]):
            yield piece.key, piece_of(tensor, piece)


def _checked(fqn: str, given: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The plain tensor behind what was given; CheckpointError unless it can be written under this name."""
    tensor = (given.master if isinstance(given, MasterWeight) else given).detach()
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        raise cannot_start(
            f"a {type(given).__name__} on {given.device} is no plain tensor",
            where=fqn,
            remedy="gather it first (DTensor.full_tensor()), or take it from a state dict",
        )
    if tensor.dtype not in DTYPES:
        raise cannot_start(f"the tensor is {tensor.dtype}, wanted torch.float32 or torch.bfloat16", where=fqn)
    if tuple(tensor.shape) != shape:
        raise cannot_start(
            f"the tensor has shape {tuple(tensor.shape)}, wanted {shape}",
            where=fqn,
            remedy="export with the config that the model was built from",
        )
    return tensor
