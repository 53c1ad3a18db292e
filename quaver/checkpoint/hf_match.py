"""How each tensor that a model asks for is met by the keys of a folder, and what happens to the keys left over.

A tensor's own key comes first; else a fused tensor is put together from per-expert keys, or a per-expert tensor is
cut out of a fused key. Works on headers alone: nothing is read here. May import: transformers (types), this room's
`files`, `hf_layout` and `hf_shards`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from quaver.checkpoint.files import cannot_start
from quaver.checkpoint.hf_layout import ExpertPiece, expert_piece, expert_pieces, is_fused, shape_fault
from quaver.checkpoint.hf_shards import READABLE, StoredTensor

_ROTARY = re.compile(r"(?:.+\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]+)\..+")


@dataclass(frozen=True)
class Part:
    """One read: what of a stored tensor goes where in the tensor that is asked for.

    Attributes:
        stored: the tensor of the file.
        cut: the piece of a fused `stored` that is read; None for all of it.
        place: the piece of a fused target that it fills; None for all of it.
    """

    stored: StoredTensor
    cut: ExpertPiece | None = None
    place: ExpertPiece | None = None


class Reads:
    """Which keys were read (or would be), and of fused keys which pieces."""

    def __init__(self) -> None:
        self._pieces: dict[str, set[tuple[int, str]] | None] = {}

    def add(self, part: Part) -> None:
        """Notes one read."""
        key = part.stored.key
        if part.cut is None:
            self._pieces[key] = None
            return
        pieces = self._pieces.setdefault(key, set())
        if pieces is not None:
            pieces.add((part.cut.expert, part.cut.part))

    def __contains__(self, key: str) -> bool:
        return key in self._pieces

    def pieces(self, key: str) -> int | None:
        """How many pieces of a fused key were read; None where it was read whole."""
        pieces = self._pieces[key]
        return None if pieces is None else len(pieces)


class Matcher:
    """The keys of one folder, and the tensors that they can make.

    Args:
        folder: for errors.
        tensors: key -> header.
        config: the folder's own, which knows its layers; None where it has none.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, StoredTensor], config: PreTrainedConfig | None
    ) -> None:
        self._folder, self._tensors, self._config = folder, tensors, config
        self._experts: dict[str, dict[int, str]] = {}  # fused FQN -> expert -> one of its per-expert keys
        for key in tensors:
            piece = expert_piece(key)
            if piece is not None:
                self._experts.setdefault(piece.fused, {}).setdefault(piece.expert, key)

    def parts(
        self, shapes: Mapping[str, Sequence[int]], whole: frozenset[str]
    ) -> dict[str, tuple[Part, ...]]:
        """The reads that make up each tensor.

        Args:
            shapes: FQN -> shape.
            whole: fused FQNs that must not be put together from per-expert keys.

        Raises:
            CheckpointError: a missing or wrongly shaped tensor, another dtype than BF16, FP16 and FP32, an expert
                out of range, halves of an odd number of rows; by key, with both shapes.
        """
        found = {fqn: self._parts(fqn, tuple(shape), whole) for fqn, shape in shapes.items()}
        missing = [fqn for fqn, parts in found.items() if not parts]
        if missing:
            raise cannot_start(
                f"the model needs {_listed(missing)}, which the files do not hold",
                where=self._folder,
                remedy="give a folder with this very architecture, or correct model.config_overrides",
            )
        return found

    def leftovers(self, reads: Reads) -> dict[str, str]:
        """The keys that were not read -> the reason why they may be left out.

        Raises:
            CheckpointError: a key without a reason, or a fused key of which only some experts were read.
        """
        dropped, extra = {}, []
        for key, stored in self._tensors.items():
            if key in reads:
                _require_all_pieces(stored, reads.pieces(key))
                continue
            reason = dropped_because(key, self._config)
            if reason is None:
                extra.append(key)
            else:
                dropped[key] = reason
        if extra:
            raise cannot_start(
                f"the files hold {_listed(extra)}, which no parameter of the model takes",
                where=self._folder,
                remedy=self._remedy(extra),
            )
        return dropped

    def _remedy(self, extra: Sequence[str]) -> str:
        if any(is_fused(key) or expert_piece(key) is not None for key in extra):
            return "experts that stand there fused and one by one, or that the model has not: keep one set"
        if self._config is None and any(_LAYER.fullmatch(key) for key in extra):
            return (
                "put the model's config.json beside the weights: it tells layers from multi-token prediction"
            )
        return "give a folder with this very architecture, or correct model.config_overrides"

    def _parts(self, fqn: str, shape: tuple[int, ...], whole: frozenset[str]) -> tuple[Part, ...]:
        stored = self._tensors.get(fqn)
        if stored is not None:
            _require(stored, shape, fqn)
            return (Part(stored),)
        if is_fused(fqn) and fqn in self._experts and fqn not in whole:
            return self._gathered(fqn, shape)
        piece = expert_piece(fqn)
        if piece is not None and piece.fused in self._tensors:
            return (self._cut(piece, shape),)
        return ()

    def _gathered(self, fqn: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """A fused tensor from per-expert keys."""
        fault = shape_fault(fqn, shape)
        if fault is not None:
            raise cannot_start(
                f"the tensor cannot be put together from experts: {fault}", where=f"{fqn} {shape}"
            )
        experts = shape[0]
        for expert, key in self._experts[fqn].items():
            if expert >= experts:
                raise cannot_start(
                    f"expert {expert} is out of range: the model has {experts} experts, 0 to {experts - 1}",
                    where=f"{key} in {self._folder}, for {fqn} {shape}",
                    remedy="set the number of experts to the file's",
                )
        parts = []
        for piece in expert_pieces(fqn, experts):
            stored = self._tensors.get(piece.key)
            rows = piece.rows(shape[1])
            want = (rows.stop - rows.start, shape[2])
            if stored is None:
                raise cannot_start(
                    f"the model needs {piece.key} {want}, which the files do not hold",
                    where=f"{self._folder}, for {fqn} {shape}",
                    remedy="set the number of experts to the file's, or fetch the whole model",
                )
            _require(stored, want, fqn)
            parts.append(Part(stored, place=piece))
        return tuple(parts)

    def _cut(self, piece: ExpertPiece, shape: tuple[int, ...]) -> Part:
        """A per-expert tensor from a fused key."""
        stored = self._tensors[piece.fused]
        where = f"{stored.key} {stored.shape} in {stored.file}, for {piece.key} {shape}"
        fault = shape_fault(stored.key, stored.shape)
        if fault is not None:
            raise cannot_start(f"the tensor cannot be taken apart: {fault}", where=where)
        if piece.expert >= stored.shape[0]:
            raise cannot_start(
                f"expert {piece.expert} is out of range: the file has {stored.shape[0]} experts",
                where=where,
                remedy="set the number of experts to the file's",
            )
        halves = 1 if piece.part == "down" else 2
        _require(stored, (stored.shape[0], shape[0] * halves, *shape[1:]), piece.key)
        return Part(stored, cut=piece)


def dropped_because(key: str, source_config: PreTrainedConfig | None) -> str | None:
    """Why a key that no parameter takes may be left out; None if it may not.

    Args:
        key: as in the file.
        source_config: of the folder that the key comes from: its number of layers decides, not the model's, so
            that a model cut short by an override does not lose layers without a word.
    """
    if _ROTARY.fullmatch(key):
        return "rotary frequencies are computed from the config"
    found = _LAYER.fullmatch(key)
    layers = getattr(source_config, "num_hidden_layers", None)
    extra = getattr(source_config, "num_nextn_predict_layers", None) or 0
    if found is not None and layers is not None and layers <= int(found["layer"]) < layers + extra:
        return f"layer {found['layer']} is a multi-token prediction layer, and the model is built without"
    return None


def _require(stored: StoredTensor, shape: tuple[int, ...], fqn: str) -> None:
    where = f"{stored.key} in {stored.file}" + (f", for {fqn}" if fqn != stored.key else "")
    if stored.dtype not in READABLE:
        raise cannot_start(
            f"the tensor is {stored.dtype} of shape {stored.shape}, wanted BF16, F16 or F32 of shape {shape}",
            where=where,
            remedy="convert the file: integers and scaled eight-bit weights have to be decoded first",
        )
    if stored.shape != shape:
        raise cannot_start(
            f"the tensor has shape {stored.shape}, wanted {shape}",
            where=where,
            remedy="give a folder with this very architecture, or correct model.config_overrides",
        )


def _require_all_pieces(stored: StoredTensor, read: int | None) -> None:
    """A fused key that was read expert by expert must have been read whole."""
    if read is None:
        return
    pieces = stored.shape[0] * (2 if stored.key.endswith("gate_up_proj") else 1)
    if read != pieces:
        raise cannot_start(
            f"only {read} of the tensor's {pieces} matrices have a parameter to go to",
            where=f"{stored.key} {stored.shape} in {stored.file}",
            remedy="set the number of experts to the file's",
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
