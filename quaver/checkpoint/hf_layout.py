"""The two ways in which Hugging Face files hold routed experts, and how a key of one maps to the other.

Fused, as transformers 5 builds them: `X.experts.gate_up_proj` [E, 2F, H] (gate first) and `X.experts.down_proj`
[E, H, F]. Per expert, as DeepSeek publishes them: `X.experts.{e}.gate_proj.weight` [F, H],
`X.experts.{e}.up_proj.weight` [F, H] and `X.experts.{e}.down_proj.weight` [H, F]. Names and shapes only; imports
torch alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_FUSED = re.compile(r"(?P<experts>(?:.+\.)?experts)\.(?P<name>gate_up_proj|down_proj)")
# no leading zeros: `01` and `1` would be two names of one expert
_PER_EXPERT = re.compile(
    r"(?P<experts>(?:.+\.)?experts)\.(?P<index>0|[1-9][0-9]*)\.(?P<name>gate_proj|up_proj|down_proj)\.weight"
)


@dataclass(frozen=True)
class ExpertPiece:
    """One expert's matrix: its own key, and where it lies in the fused tensor.

    Attributes:
        key: `X.experts.{e}.gate_proj.weight` and the like.
        fused: `X.experts.gate_up_proj` or `X.experts.down_proj`.
        expert: the index on dimension 0 of the fused tensor.
        part: `gate` (first half of dimension 1), `up` (second half) or `down` (all of it).
    """

    key: str
    fused: str
    expert: int
    part: str

    def rows(self, fused_rows: int) -> slice:
        """The rows of this piece among the `fused_rows` of the fused tensor's dimension 1."""
        half = fused_rows // 2
        return {"gate": slice(0, half), "up": slice(half, fused_rows), "down": slice(0, fused_rows)}[
            self.part
        ]


def is_fused(fqn: str) -> bool:
    """True for the two fused names."""
    return _FUSED.fullmatch(fqn) is not None


def expert_piece(key: str) -> ExpertPiece | None:
    """The piece that a per-expert key holds; None for any other key."""
    found = _PER_EXPERT.fullmatch(key)
    if found is None:
        return None
    part = found["name"].removesuffix("_proj")
    fused = f"{found['experts']}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    return ExpertPiece(key, fused, int(found["index"]), part)


def expert_pieces(fused: str, experts: int) -> Iterator[ExpertPiece]:
    """The pieces of a fused tensor in order: expert by expert, gate before up."""
    found = _FUSED.fullmatch(fused)
    if found is None:
        raise ValueError(f"{fused} is no fused tensor of experts")
    parts = ("down",) if found["name"] == "down_proj" else ("gate", "up")
    for expert in range(experts):
        for part in parts:
            yield ExpertPiece(f"{found['experts']}.{expert}.{part}_proj.weight", fused, expert, part)


def shape_fault(fused: str, shape: Sequence[int]) -> str | None:
    """Why a fused tensor of this shape cannot be taken apart into experts; None if it can."""
    if len(shape) != 3:
        return f"fused experts have three dimensions [experts, rows, columns], this has {len(shape)}"
    if fused.endswith("gate_up_proj") and shape[1] % 2:
        return f"dimension 1 holds gate and up, two halves, but it is odd ({shape[1]})"
    return None


def other_layouts(model: nn.Module) -> list[str]:
    """FQNs of fused tensors that do *not* hold [E, 2F, H] and [E, H, F], gate first: some architectures differ.

    Such tensors can be read and written as they are, never taken apart. transformers notes on each expert
    module how its tensors lie; a module without these notes has the usual layout.
    """
    found = []
    for fqn, module in model.named_modules():
        usual = (
            getattr(module, "is_concatenated", True)
            and not getattr(module, "is_transposed", False)
            and not getattr(module, "has_bias", False)
        )
        if not usual:
            names = (f"{fqn}.{name}" if fqn else name for name in module._parameters)
            found += [name for name in names if is_fused(name)]
    return found


def piece_of(tensor: torch.Tensor, piece: ExpertPiece) -> torch.Tensor:
    """The view of a fused tensor [E, rows, columns] that is one piece."""
    return tensor[piece.expert, piece.rows(tensor.shape[1])]
