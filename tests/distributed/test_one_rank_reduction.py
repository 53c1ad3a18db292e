"""Gradients on one rank: the numbers of torch's own reduction, in the buffer that they were gathered into."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from quaver.distributed import PARAMS_BF16, init_world, leave_world, shard_module
from quaver.distributed.one_rank import InPlaceReduceScatter


@pytest.fixture
def mesh():
    started = init_world("cpu")
    yield init_device_mesh("cpu", (1,))
    if started:
        leave_world()


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3, bias=False))


def gradients(model: nn.Module, micro_steps: int) -> dict[str, torch.Tensor]:
    for number in range(micro_steps):
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(x).float().square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        found[name] = parameter.grad.to_local()
    return found


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_gradients_are_torchs_own_bits(mesh, micro_steps: int) -> None:
    ours, plain = net(), net()
    for layer in (ours[0], ours):
        shard_module(layer, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
    for layer in (plain[0], plain):
        fully_shard(layer, mesh=mesh, mp_policy=PARAMS_BF16)
    found, wanted = gradients(ours, micro_steps), gradients(plain, micro_steps)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(found[name], gradient), name


def test_gradients_lie_where_they_were_gathered(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, handed_out = InPlaceReduceScatter.allocate, []

    def recorded(self, size, **kwargs):
        handed_out.append(allocate(self, size, **kwargs))
        return handed_out[-1]

    monkeypatch.setattr(InPlaceReduceScatter, "allocate", recorded)
    model = net()
    shard_module(model, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        gradients(model, 1)
    assert len(handed_out) == 2
    assert handed_out[0] is handed_out[1]
    held = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
    assert held == {handed_out[0].data_ptr()}
    whole = [sum(p.numel() for p in model.parameters())]
    assert "aten::div" not in {e.name for e in profiled.events() if e.input_shapes and e.input_shapes[0] == whole}


def test_the_filled_buffer_comes_back_once() -> None:
    comm = InPlaceReduceScatter()
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    first = comm.allocate((6,), **like)
    first.view(1, -1).fill_(1)
    assert comm.allocate((6,), **like) is first
    second = comm.allocate((6,), **like)
    assert second.data_ptr() != first.data_ptr()


def test_a_reduction_that_failed_leaves_nothing_behind() -> None:
    comm = InPlaceReduceScatter()
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    unfilled = comm.allocate((6,), **like)  # still held, by a traceback say
    again = comm.allocate((6,), **like)
    assert again is not unfilled
    again.fill_(2)
    assert comm.allocate((6,), **like) is again
    freed = comm.allocate((6,), **like)
    freed.fill_(3)
    del freed
    assert comm.allocate((8,), **like).shape == (8,)


def test_two_sizes_in_one_reduction_are_an_error() -> None:
    comm = InPlaceReduceScatter()
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    held = comm.allocate((6,), **like)
    held.fill_(1)
    with pytest.raises(AssertionError, match="output"):
        comm.allocate((3,), **like)
