"""What only a GPU can show; skipped with a reason where there is none that fits."""

from __future__ import annotations

import pytest
import torch
from helpers.passes import dense_operands, tensor
from helpers.policies import FLOOR, RECIPES

from quaver.backends import GemmSite, QuantizationRole, QuantizedOperand, ReferenceBackend
from quaver.low_precision.recipe import RECIPES as SPECS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
Role = QuantizationRole
SITE = GemmSite("layer.proj", "fprop")


def moved(operand: QuantizedOperand) -> QuantizedOperand:
    data, scale = operand.data.cuda(), operand.scale.cuda()
    return QuantizedOperand(data, scale, operand.logical_dtype, operand.format, operand.orientation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_reference_gives_the_cpus_codes(recipe, dtype):
    backend, x = ReferenceBackend(), tensor(200, 130, dtype=dtype)
    ends = torch.tensor([40, 40, 71, 200])
    for role in (Role.INPUT_FWD, Role.GRAD_OUTPUT):
        spec = SPECS[recipe].roles[role]
        for groups in (None, ends):
            here = backend.quantize_dual(x, spec=spec, role=role, group_list=groups)
            there = backend.quantize_dual(
                x.cuda(), spec=spec, role=role, group_list=None if groups is None else groups.cuda()
            )
            for a, b in zip(here, there):
                assert torch.equal(a.data, b.data.cpu())
                assert torch.equal(a.scale, b.scale.cpu())


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_references_products_are_within_the_accumulates_rounding(recipe, layout):
    left, right = dense_operands(layout, recipe, torch.bfloat16)
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    here = ReferenceBackend().low_precision_matmul(left, right, **kwargs)
    there = ReferenceBackend().low_precision_matmul(moved(left), moved(right), **kwargs)
    torch.testing.assert_close(there.cpu(), here, rtol=2**-7, atol=2**-7 * float(here.abs().max()))


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_the_tensor_cores_agree_with_the_reference(layout):
    if torch.cuda.get_device_capability()[0] != 10:
        pytest.skip(f"needs compute capability 10.x, this is {torch.cuda.get_device_capability()}")
    from quaver.backends.cuda import CUDABackend

    left, right = dense_operands(layout, FLOOR, torch.bfloat16)
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    here = ReferenceBackend().low_precision_matmul(left, right, **kwargs)
    there = CUDABackend().low_precision_matmul(moved(left), moved(right), **kwargs)
    torch.testing.assert_close(there.cpu(), here, rtol=2**-7, atol=2**-7 * float(here.abs().max()))
