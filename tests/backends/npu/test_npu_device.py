"""What only an Ascend 950 can show: its quantisers' bits and its products' rounding, against the reference on the CPU.

    pytest tests/backends/npu/test_npu_device.py
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from helpers.passes import dense_operands, tensor
from helpers.policies import FORMATS, RECIPES

from quaver.backends import GemmSite, QuantizationRole, QuantizedOperand, ReferenceBackend
from quaver.backends.npu import DeviceFacts, NPUBackend, probe
from quaver.low_precision.recipe import RECIPES as SPECS

Role = QuantizationRole
SITE = GemmSite("layer.proj", "fprop")


def facts() -> DeviceFacts:
    missing = importlib.util.find_spec("torch_npu") is None
    return DeviceFacts(trouble="torch_npu is not installed") if missing else probe()


HERE = facts()
pytestmark = pytest.mark.skipif(HERE.trouble is not None, reason=f"needs an Ascend 950: {HERE.trouble}")


def moved(operand: QuantizedOperand, device: str) -> QuantizedOperand:
    data, scale = operand.data.to(device), operand.scale.to(device)
    return QuantizedOperand(data, scale, operand.logical_dtype, operand.format, operand.orientation)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 256), (70, 33), (3, 64, 96)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales(recipe, shape, dtype):
    x = tensor(*shape, dtype=dtype)
    for role in (Role.INPUT_FWD, Role.GRAD_OUTPUT):
        spec = SPECS[recipe].roles[role]
        here = ReferenceBackend().quantize_dual(x, spec=spec, role=role)
        there = NPUBackend().quantize_dual(x.npu(), spec=spec, role=role)
        for wanted, found in zip(here, there):
            assert torch.equal(found.scale.cpu(), wanted.scale)
            assert torch.equal(found.data.cpu(), wanted.data)


@pytest.mark.parametrize("name", ["zero", "nan", "inf"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_special_tensors(recipe, name):
    x = torch.zeros(33, 64).bfloat16() if name == "zero" else tensor(33, 64)
    if name != "zero":
        x[3, 5] = float(name)
    spec = SPECS[recipe].roles[Role.INPUT_FWD]
    here = ReferenceBackend().quantize_dual(x, spec=spec, role=Role.INPUT_FWD)
    there = NPUBackend().quantize_dual(x.npu(), spec=spec, role=Role.INPUT_FWD)
    for wanted, found in zip(here, there):
        assert torch.equal(found.scale.cpu(), wanted.scale)
        assert torch.equal(found.data.cpu(), wanted.data)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dense_products(recipe, layout):
    left, right = dense_operands(layout, recipe, torch.bfloat16, t=192, n=64, k=128)
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    wanted = ReferenceBackend().low_precision_matmul(left, right, **kwargs)
    close(NPUBackend().low_precision_matmul(moved(left, "npu"), moved(right, "npu"), **kwargs), wanted)


@pytest.mark.parametrize("counts", [(64, 0, 128), (40, 0, 31, 1)])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("recipe", FORMATS)
def test_grouped_products(recipe, layout, counts):
    roles, ends, rows = SPECS[recipe].roles, torch.tensor(counts).cumsum(0), sum(counts)
    backend = ReferenceBackend()

    def quantised(x: torch.Tensor, role: QuantizationRole, turn: str) -> QuantizedOperand:
        groups = ends if turn == "col" and x.ndim == 2 else None
        return backend.quantize(x, spec=roles[role], role=role, orientation=turn, group_list=groups)

    if layout == "TN":
        left = quantised(tensor(rows, 64), Role.GRAD_OUTPUT, "col")
        right = quantised(tensor(rows, 128, seed=1), Role.INPUT_BWD, "col")
    else:
        weight = tensor(len(counts), 128, 64, dtype=torch.float32, seed=1)
        right = quantised(weight, Role.WEIGHT_FWD, "col" if layout == "NN" else "row")
        left = quantised(tensor(rows, 128 if layout == "NN" else 64), Role.INPUT_FWD, "row")
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    wanted = backend.low_precision_grouped_matmul(left, right, ends, **kwargs)
    operands = moved(left, "npu"), moved(right, "npu"), ends.npu()
    close(NPUBackend().low_precision_grouped_matmul(*operands, **kwargs), wanted)
