"""Known answers of MX quantisation, through the adapter and through the operators that stand for the NPU."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from helpers import npu_harness

from quaver.backends import QuantizationRole
from quaver.low_precision.recipe import mxfp8_spec

LINES = (Path(__file__).parents[2] / "golden" / "npu" / "mx_vectors.txt").read_text().splitlines()
RULES = {0: "floor", 1: "rceil"}


def quantised(x: torch.Tensor, alg: int, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs of scales as the operator gives them, scales of the contract, codes) of a BF16 tensor."""
    backend = npu_harness.backend()
    role = QuantizationRole.INPUT_FWD
    turn = "row" if axis == -1 else "col"
    spec = mxfp8_spec(RULES[alg]).roles[role]
    operand = backend.quantize(x.bfloat16(), spec=spec, role=role, orientation=turn)
    codes, packed = torch.ops.npu.npu_dynamic_mx_quant(x.bfloat16(), axis=axis, dst_type=292, scale_alg=alg)
    assert torch.equal(codes.view(torch.uint8), operand.data)
    return packed, operand.scale, operand.data


def lists(line: str) -> list:
    """The lists of numbers in a line."""
    found, depth, start = [], 0, 0
    for place, sign in enumerate(line):
        if sign == "[":
            start = start if depth else place
            depth += 1
        elif sign == "]":
            depth -= 1
            if depth == 0:
                found.append(ast.literal_eval(line[start : place + 1]))
    return found


def alg_of(line: str) -> int:
    return int(re.search(r"alg (\d)", line).group(1))


def test_every_line_is_known():
    kinds = ("alg", "amax", "zero block", "axis -2", "bad")
    assert all(line.startswith(kinds) for line in LINES if line)
    assert len(LINES) == 26


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("alg")])
def test_bytes(line):
    scale, codes = lists(line)
    packed, _, data = quantised(torch.tensor([[0.0, 8.0, 64.0, 512.0]]), alg_of(line))
    assert packed.tolist() == scale
    assert data.tolist() == codes


@pytest.mark.parametrize("line", sorted({line for line in LINES if line.startswith("amax")}))
def test_values_at_the_edges_of_a_rule(line):
    amax = float(line.split()[1])
    scale, values = lists(line)
    packed, _, data = quantised(torch.tensor([[amax, amax / 3]]), alg_of(line))
    assert packed.flatten().tolist() == scale
    assert data.view(torch.float8_e4m3fn).float().flatten().tolist() == values


def test_zero_block():
    (line,) = [line for line in LINES if line.startswith("zero")]
    scale, codes = lists(line)
    for alg in RULES:
        packed, _, data = quantised(torch.zeros(1, 2), alg)
        assert packed.tolist() == scale
        assert [data.tolist()] == codes


def test_a_column_axis():
    (line,) = [line for line in LINES if line.startswith("axis")]
    (wanted,) = lists(line)
    x = torch.zeros(96, 2)
    x[::32] = torch.tensor([[1.0, 256.0], [4.0, 1024.0], [16.0, 4096.0]])
    packed, scale, _ = quantised(x, 0, axis=-2)
    assert packed.tolist() == wanted
    assert scale.tolist() == [[119, 127], [121, 129], [123, 131]]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("bad")])
def test_nothing_non_finite_is_hidden(line):
    scale, codes = lists(line)
    bad = {"inf": torch.inf, "nan": torch.nan}[line.split()[1]]
    packed, _, data = quantised(torch.tensor([[1.0, bad, -3.0, 0.0, 2.0]]), alg_of(line))
    assert packed.tolist() == scale
    assert data.flatten().tolist() == codes
