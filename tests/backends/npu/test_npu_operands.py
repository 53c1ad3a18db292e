"""The adapter against the reference backend: same codes, scales and products, bit for bit, on the harness."""

from __future__ import annotations

import pytest
import torch
from helpers import npu_harness
from helpers.passes import dense_operands, tensor
from helpers.policies import FLOOR, HIF8, RCEIL, RECIPES

from quaver.backends import GemmSite, OperandError, QuantizationRole, QuantizedOperand, ReferenceBackend
from quaver.errors import CapabilityError
from quaver.low_precision.recipe import RECIPES as SPECS

Role = QuantizationRole
SITE = GemmSite("layer.proj", "fprop")
DTYPES = [torch.bfloat16, torch.float32]


def pair():
    return npu_harness.backend(), ReferenceBackend()


def same(found: QuantizedOperand, wanted: QuantizedOperand) -> None:
    assert torch.equal(found.data, wanted.data)
    assert torch.equal(found.scale, wanted.scale)
    assert (found.scale.dtype, found.logical_dtype) == (wanted.scale.dtype, wanted.logical_dtype)
    assert (found.format, found.orientation) == (wanted.format, wanted.orientation)


def both(method, *args, **kwargs):
    return [getattr(backend, method)(*args, **kwargs) for backend in pair()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 128), (70, 33), (5, 96), (1, 31), (3, 48, 80), (2, 33, 16)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales(recipe, shape, dtype):
    x = tensor(*shape, dtype=dtype)
    for role in (Role.INPUT_FWD, Role.GRAD_OUTPUT):
        spec = SPECS[recipe].roles[role]
        for operands in zip(*both("quantize_dual", x, spec=spec, role=role)):
            same(*operands)
        for orientation in ("row", "col"):
            same(*both("quantize", x, spec=spec, role=role, orientation=orientation))


@pytest.mark.parametrize("counts", [(40, 0, 31, 1, 33), (0, 64, 0), (32, 32), (65, 127, 1, 0, 3), (0, 0, 7)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_tokens(recipe, counts):
    x, ends = tensor(sum(counts), 48), torch.tensor(counts).cumsum(0)
    spec, role = SPECS[recipe].roles[Role.INPUT_BWD], Role.INPUT_BWD
    same(*both("quantize", x, spec=spec, role=role, orientation="col", group_list=ends))
    duals = both("quantize_dual", x, spec=spec, role=role, group_list=ends)
    for found, wanted in zip(*duals):
        same(found, wanted)


@pytest.mark.parametrize("shape", [(48, 64), (3, 40, 64)])
def test_a_scale_from_a_given_amax(shape):
    """What sharded HiF8 weights agree on before they are quantised."""
    x = tensor(*shape, dtype=torch.float32)
    amax = x.abs().amax() * 3 if len(shape) == 2 else x.abs().amax((1, 2)) * torch.tensor([1.0, 2.0, 0.5])
    spec, role = SPECS[HIF8].roles[Role.WEIGHT_FWD], Role.WEIGHT_FWD
    same(*both("quantize", x, spec=spec, role=role, orientation="row", amax=amax))


def special(name):
    x = tensor(33, 64)
    if name == "zero":
        return x.zero_()
    if name == "tiny":
        return x.zero_().add_(torch.tensor(2.0**-133).bfloat16())
    x[3, 5] = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}[name]
    return x


@pytest.mark.parametrize("name", ["zero", "tiny", "nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_special_tensors(recipe, dtype, name):
    """Zero and non-finite tensors get the recipe's scale 1 or byte 255; the harness itself divides 0 by 0."""
    x = special(name).to(dtype)
    spec, role = SPECS[recipe].roles[Role.INPUT_FWD], Role.INPUT_FWD
    for found, wanted in zip(*both("quantize_dual", x, spec=spec, role=role)):
        same(found, wanted)
    if recipe == HIF8:
        assert float(found.scale) > 0 if name == "tiny" else float(found.scale) == 1


@pytest.mark.parametrize("row0", [0, 20, 48, 77])
@pytest.mark.parametrize("recipe", [FLOOR, RCEIL])
def test_blocks_that_a_shard_cuts(recipe, row0):
    x = tensor(44, 40, dtype=torch.float32)
    spec, role = SPECS[recipe].roles[Role.WEIGHT_BWD], Role.WEIGHT_BWD
    scales = both("column_scales", x, spec=spec, role=role, row0=row0)
    assert torch.equal(*scales)
    raised = scales[0] + 1
    codes = both("quantize_columns", x, raised, spec=spec, role=role, row0=row0)
    assert torch.equal(*codes)
    with pytest.raises(CapabilityError, match="no blocks"):
        pair()[0].column_scales(x, spec=SPECS[HIF8].roles[role], role=role, row0=0)


@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dense_products(recipe, layout, output):
    left, right = dense_operands(layout, recipe, torch.bfloat16)
    found, wanted = both("low_precision_matmul", left, right, layout=layout, output_dtype=output, site=SITE)
    assert torch.equal(found, wanted)
    assert found.dtype is output


@pytest.mark.parametrize("stored", ["as Hugging Face stores it", "as the GEMM sees it"])
@pytest.mark.parametrize("counts", [(40, 0, 31, 1), (0, 0, 5, 64)])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_products(recipe, layout, counts, stored):
    reference, roles = ReferenceBackend(), SPECS[recipe].roles
    rows, ends = sum(counts), torch.tensor(counts).cumsum(0)
    k, n = 96, 40

    def quantised(x, role, turn, groups=None):
        return reference.quantize(x, spec=roles[role], role=role, orientation=turn, group_list=groups)

    if layout == "TN":
        left = quantised(tensor(rows, n), Role.GRAD_OUTPUT, "col", ends)
        right = quantised(tensor(rows, k, seed=1), Role.INPUT_BWD, "col", ends)
    else:
        turn = "col" if layout == "NN" else "row"
        weight = tensor(len(counts), k, n, dtype=torch.float32, seed=1)
        if stored == "as the GEMM sees it":
            right = quantised(weight, Role.WEIGHT_FWD, turn)
        else:
            other = "row" if layout == "NN" else "col"
            kept = quantised(weight.transpose(1, 2).contiguous(), Role.WEIGHT_FWD, other)
            scale = kept.scale if recipe == HIF8 else kept.scale.transpose(1, 2)
            right = QuantizedOperand(kept.data.transpose(1, 2), scale, torch.bfloat16, kept.format, turn)
        left = quantised(tensor(rows, k if layout == "NN" else n), Role.INPUT_FWD, "row")
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    found, wanted = both("low_precision_grouped_matmul", left, right, ends, **kwargs)
    assert torch.equal(found, wanted)


def test_the_ledger_names_the_operator():
    backend, _ = pair()
    left, right = dense_operands("NT", FLOOR, torch.bfloat16)
    backend.low_precision_matmul(left, right, layout="NT", output_dtype=torch.bfloat16, site=SITE)
    assert dict(backend.ledger.executed) == {
        ("layer.proj", "dense", "fprop", "mxfp8_e4m3", "npu_quant_matmul"): 1
    }


def test_operands_that_do_not_fit_are_refused_before_any_kernel():
    backend, _ = pair()
    left, right = dense_operands("NT", FLOOR, torch.bfloat16)
    run = {"layout": "NT", "output_dtype": torch.bfloat16, "site": SITE}
    wrong = QuantizedOperand(right.data, right.scale[:, :2], torch.bfloat16, right.format, "row")
    with pytest.raises(OperandError, match=r"wants torch.uint8 \(40, 3\)"):
        backend.low_precision_matmul(left, wrong, **run)
    with pytest.raises(OperandError, match="blocks do not run along the contraction"):
        backend.low_precision_matmul(left, right, **{**run, "layout": "NN"})
    with pytest.raises(ValueError, match="amax cannot be given"):
        backend.quantize(
            tensor(4, 64), spec=SPECS[FLOOR].roles[Role.INPUT_FWD], role=Role.INPUT_FWD, orientation="row",
            amax=torch.tensor(1.0),
        )  # fmt: skip
    many = torch.arange(1025)
    spec = SPECS[FLOOR].roles[Role.INPUT_BWD]
    with pytest.raises(OperandError, match="at most 1024"):
        backend.quantize(
            tensor(1024, 32), spec=spec, role=Role.INPUT_BWD, orientation="col", group_list=many
        )
    with pytest.raises(OperandError, match="takes BF16 tokens"):
        backend.quantize(
            tensor(8, 32, dtype=torch.float32), spec=spec, role=Role.INPUT_BWD, orientation="col",
            group_list=torch.tensor([8]),
        )  # fmt: skip
    assert not backend.ledger.executed
