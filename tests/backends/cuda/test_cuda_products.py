"""The CUDA adapter on CPU tensors: every call passes torch's own checks and computes what the reference computes."""

from __future__ import annotations

import pytest
import torch
from helpers import cuda_witness
from helpers.passes import one_pass
from helpers.policies import FLOOR, policy

from quaver.backends import GemmSite, OperandError, QuantizationRole, QuantizedOperand, ReferenceBackend
from quaver.backends.cuda import CUDABackend, CudaFacts
from quaver.low_precision.recipe import RECIPES

B200 = CudaFacts("NVIDIA B200", (10, 0), {"torch": "2.13.0", "cuda": "12.9"}, device_type="cpu")
SITE = GemmSite("layer.proj", "fprop")
Role = QuantizationRole
SPEC = RECIPES[FLOOR].roles[Role.INPUT_FWD]


@pytest.fixture(autouse=True)
def witness(monkeypatch):
    cuda_witness.install(monkeypatch)


def quantised(*shape, turn, seed=0, ends=None):
    torch.manual_seed(seed)
    x = (torch.randn(*shape) * torch.logspace(-5, 5, shape[-1], base=2.0)).bfloat16()
    return ReferenceBackend().quantize(x, spec=SPEC, role=Role.INPUT_FWD, orientation=turn, group_list=ends)


def agree(method, *operands, exact, **kwargs):
    found, wanted = (getattr(b, method)(*operands, **kwargs) for b in (CUDABackend(facts=B200), ReferenceBackend()))
    assert found.is_contiguous()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if exact:  # nothing is filled up, so sums have the same terms in the same order
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("t", "n", "k"), [(160, 96, 128), (70, 40, 33)])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_dense(layout, t, n, k, output):
    shapes = {"NT": ((t, k), (n, k)), "NN": ((t, n), (n, k)), "TN": ((t, n), (t, k))}[layout]
    turns = {"NT": ("row", "row"), "NN": ("row", "col"), "TN": ("col", "col")}[layout]
    left, right = (quantised(*s, turn=turn, seed=i) for i, (s, turn) in enumerate(zip(shapes, turns)))
    kwargs = {"layout": layout, "output_dtype": output, "site": SITE}
    agree("low_precision_matmul", left, right, exact=t == 160, **kwargs)


@pytest.mark.parametrize("counts", [(32, 0, 64, 160), (40, 0, 31, 1)])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_grouped(layout, counts):
    rows, ends, exact = sum(counts), torch.tensor(counts).cumsum(0), counts[0] == 32
    k, n = (128, 64) if exact else (33, 40)
    if layout == "TN":
        left = quantised(rows, n, turn="col", ends=ends)
        right = quantised(rows, k, turn="col", ends=ends, seed=1)
    else:
        stored = quantised(len(counts), n, k, turn="row" if layout == "NN" else "col", seed=1)
        turn = "col" if layout == "NN" else "row"
        data, scale = stored.data.transpose(1, 2), stored.scale.transpose(1, 2)
        right = QuantizedOperand(data, scale, torch.bfloat16, stored.format, turn)
        left = quantised(rows, k if layout == "NN" else n, turn="row")
    kwargs = {"layout": layout, "output_dtype": torch.bfloat16, "site": SITE}
    agree("low_precision_grouped_matmul", left, right, ends, exact=exact, **kwargs)


def test_no_token_at_all():
    ends = torch.zeros(3, dtype=torch.int64)
    left, right = (quantised(0, size, turn="col", ends=ends) for size in (48, 32))
    out = CUDABackend(facts=B200).low_precision_grouped_matmul(
        left, right, ends, layout="TN", output_dtype=torch.bfloat16, site=SITE
    )
    assert out.shape == (3, 48, 32)
    assert not out.any()


def test_a_whole_pass_names_the_functions_in_the_ledger():
    backend = CUDABackend(facts=B200)
    one_pass(policy(FLOOR, backend))
    assert {key[4] for key in backend.ledger.executed} == {"scaled_mm", "scaled_grouped_mm"}
    assert sum(backend.ledger.executed.values()) == 9


def test_an_error_is_raised_as_itself_with_fqn_and_gemm(monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(*_, **__):
        raise error

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", broken)
    backend = CUDABackend(facts=B200)
    with pytest.raises(RuntimeError) as caught:
        one_pass(policy(FLOOR, backend))
    assert caught.value is error
    assert any("block.proj fprop" in note for note in error.__notes__)
    assert not backend.ledger.executed


def test_misfits_are_refused():
    ends = torch.tensor([32, 64])
    left, right = (quantised(64, size, turn="col", ends=ends) for size in (48, 32))
    grouped = CUDABackend(facts=B200).low_precision_grouped_matmul
    with pytest.raises(OperandError, match="gives BF16"):
        grouped(left, right, ends, layout="TN", output_dtype=torch.float32, site=SITE)
    wrong = QuantizedOperand(left.data, left.scale[:1], torch.bfloat16, left.format, "col")
    with pytest.raises(OperandError, match="wants"):
        grouped(wrong, right, ends, layout="TN", output_dtype=torch.bfloat16, site=SITE)
