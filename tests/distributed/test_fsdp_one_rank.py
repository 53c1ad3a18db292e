"""fully_shard on one rank computes the very bits of the library use, and never with a stale weight."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FLOOR, FORMATS, HIF8, policy
from helpers.recording import RecordingBackend
from helpers.sharding import Gathered, blocks, record_gathers, shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from quaver.errors import StaleWeightError
from quaver.low_precision import (
    MasterWeight,
    planned_sites,
    quantised_weights,
    quantize_weights,
    refresh,
    refresh_stale,
)

ROW, COL = ("row_data", "row_scale"), ("col_data", "col_scale")
BOTH = ROW + COL
WEIGHTS = ["0.proj.weight", "0.experts.gate_up_proj", "0.experts.down_proj"]


def data(seed=0):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def sharded(recipe_id, mesh, *, reshard=True, count=2, backend=None, attach=True):
    model = blocks(policy(recipe_id, backend), count=count)
    quantize_weights(model, refresh=False)
    shard(model, mesh, reshard_after_forward=reshard)
    if attach:
        refresh(model)
    return model


def forward(model, x, recompute=False):
    for block in model:
        x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    return x


def run(model, *, micro_steps=2, steps=2, recompute=False):
    """Losses, gradients of the last step and masters at the end, as plain tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses, grads = [], {}
    for step in range(steps):
        for micro_step in range(micro_steps):
            loss = (
                forward(model, data(10 * step + micro_step).requires_grad_(), recompute).float().pow(2).mean()
            )
            loss.backward()
            losses.append(loss.detach())
        grads = {name: plain(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        refresh_stale(model, after_step=True)
    return losses, grads, {name: plain(t).clone() for name, t in model.state_dict().items()}


def plain(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert type(local) is torch.Tensor
    return local


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_losses_gradients_and_masters_equal_the_library_use(recipe_id, reshard, recompute, mesh):
    library = blocks(policy(recipe_id))
    quantize_weights(library)
    wanted = run(library)
    model = sharded(recipe_id, mesh, reshard=reshard)
    found = run(model, recompute=recompute)
    assert found[0] == wanted[0]
    for a, b in zip(found[1:], wanted[1:]):
        assert a.keys() == b.keys()
        unequal = [name for name in a if not torch.equal(a[name], b[name])]
        assert unequal == []
    ledger = model[0].proj.recipe.backend.ledger
    ledger.check(planned_sites(model), micro_steps=4)
    assert [local.state.refreshes for _, local in quantised_weights(model).values()] == [2] * 6


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_fields_by_phase(recipe_id, reshard, mesh, monkeypatch):
    """MXFP8: forward one direction if the copy is freed (row dense, col grouped), else both; backward both.
    HiF8: the same storage every time."""
    model = sharded(recipe_id, mesh, reshard=reshard, count=1)
    calls = record_gathers(monkeypatch)
    for _ in range(2):
        forward(model, data().requires_grad_()).float().sum().backward()
    ahead = [ROW, COL, COL] if reshard else [BOTH] * 3
    behind = [BOTH] * 3
    if recipe_id == HIF8:
        ahead = behind = [("data", "scale")] * 3
    wanted = [Gathered(fqn, "forward", reshard, fields) for fqn, fields in zip(WEIGHTS, ahead)]
    if reshard:  # an unfreed copy serves the backward as it is
        wanted += [Gathered(fqn, "backward", reshard, fields) for fqn, fields in zip(WEIGHTS, behind)]
    assert calls == wanted * 2


def test_recompute_and_prefetch_gather_for_the_backward(mesh, monkeypatch):
    """Three blocks, so that one is prefetched in backward: each is gathered once ahead and once behind."""
    model = sharded(FLOOR, mesh, count=3)
    forward(model, data()).sum().backward()
    calls = record_gathers(monkeypatch)
    forward(model, data().requires_grad_(), recompute=True).float().sum().backward()
    assert [c.phase for c in calls] == ["forward"] * 9 + ["backward"] * 9
    assert {c.fields for c in calls if c.phase == "backward"} == {BOTH}
    assert sorted(c.fqn for c in calls[9:]) == sorted(c.fqn for c in calls[:9])


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_only_quantised_weights_take_the_extension(recipe_id, mesh, monkeypatch):
    """Norms and biases are plain tensors: torch gathers them as ever."""
    model = sharded(recipe_id, mesh, count=1)
    calls = record_gathers(monkeypatch)
    model(data())
    assert [c.fqn for c in calls] == WEIGHTS
    gathered = {name: type(p).__name__ for name, p in model.named_parameters()}
    assert gathered["0.norm.weight"] == gathered["0.proj.bias"] == "DTensor"  # resharded again
    assert type(plain(model[0].norm.weight)) is torch.Tensor
    assert isinstance(model[0].proj.weight.to_local(), MasterWeight)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_local_storage_survives_reshard_micro_steps_and_recompute(recipe_id, reshard, mesh):
    backend = RecordingBackend()
    model = sharded(recipe_id, mesh, reshard=reshard, backend=backend)

    def storage():
        return {
            (fqn, name): (t.data_ptr(), t.untyped_storage().nbytes(), t.clone())
            for fqn, (_, local) in quantised_weights(model).items()
            for name, t in local.physical.items()
        }

    before, calls = storage(), len(backend.weight_calls())
    assert calls == 6
    for micro_step in range(4):
        forward(
            model, data(micro_step).requires_grad_(), recompute=micro_step % 2 == 1
        ).float().sum().backward()
        after = storage()
        for key, (pointer, size, value) in before.items():
            assert after[key][:2] == (pointer, size)
            assert size > 0
            assert torch.equal(after[key][2], value)
    assert len(backend.weight_calls()) == calls


def test_sharding_without_attaching_is_a_named_error(mesh):
    model = sharded(FLOOR, mesh, attach=False)
    with pytest.raises(StaleWeightError, match=r"(?s)never attached.*LowPrecisionLinear.*quaver\.attach"):
        model(data())


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_forgotten_refresh_is_a_named_error(recipe_id, reshard, mesh):
    """Also where a no-grad forward has left a gathered copy behind, which torch would use without a gather."""
    for validate in (False, True):
        model = sharded(recipe_id, mesh, reshard=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        forward(model, data()).float().sum().backward()
        if validate:
            with torch.no_grad():
                model(data())
        optimizer.step()
        with pytest.raises(StaleWeightError, match=r"(?s)0\.proj\.weight.*quaver\.attach"), torch.no_grad():
            model(data())


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_refresh_frees_copies_that_a_forward_left(recipe_id, mesh):
    """The second model never had such a copy."""
    model, other = (sharded(recipe_id, mesh, reshard=False) for _ in range(2))
    shards = [local for m in (model, other) for _, local in quantised_weights(m).values()]
    with torch.no_grad():
        before = model(data())
        for local in shards:
            local.mul_(1.5)
        with pytest.raises(StaleWeightError, match="older than its master"):
            model(data())
        refresh(model)
        refresh(other)
        assert torch.equal(model(data()), other(data()))
        assert not torch.equal(model(data()), before)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_training_goes_on_after_a_pass_that_raised(recipe_id, reshard, where, mesh):
    """A stale weight is reported, refreshed, and the next step is the one of a model that never failed."""
    model, other = (sharded(recipe_id, mesh, reshard=reshard) for _ in range(2))
    weight = quantised_weights(model)["1.experts.down_proj"][1]
    y = forward(model, data()) if where == "backward" else None
    with torch.no_grad():
        weight.copy_(weight.master.clone())  # the values stay, the codes are stale all the same
    with pytest.raises(StaleWeightError, match=r"1\.experts\.down_proj"):
        forward(model, data()) if y is None else y.float().sum().backward()
    refresh(model)
    for parameter in model.parameters():
        parameter.grad = None
    found, wanted = run(model), run(other)
    assert found[0] == wanted[0]
    for a, b in zip(found[1:], wanted[1:]):
        assert [name for name in b if not torch.equal(a[name], b[name])] == []


def test_a_write_to_a_local_shard_through_a_plain_alias_is_seen(mesh):
    model = sharded(FLOOR, mesh)
    with torch.no_grad():
        model.state_dict()["0.proj.weight"].to_local()[3].zero_()
    with pytest.raises(StaleWeightError, match=r"(?s)written since.*0\.proj\.weight"):
        model(data())


def test_a_refresh_between_forward_and_backward_is_refused(mesh):
    for reshard in (True, False):
        model = sharded(FLOOR, mesh, reshard=reshard)
        y = forward(model, data().requires_grad_())
        refresh(model)
        with pytest.raises(StaleWeightError, match="between forward and backward"):
            y.float().sum().backward()


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_state_dicts_are_plain_fp32_dtensors_and_load(recipe_id, mesh):
    model, other = sharded(recipe_id, mesh), sharded(recipe_id, mesh)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.25)
    refresh(other)
    given = other.state_dict()
    for name, tensor in given.items():
        assert type(tensor) is DTensor, name
        assert (type(tensor.to_local()), tensor.dtype) == (torch.Tensor, torch.float32)
    assert not torch.equal(model(data()), other(data()))
    model.load_state_dict(given)
    assert torch.equal(model(data()), other(data()))


def test_frozen_weights_have_no_wgrad(mesh):
    model = blocks(policy(HIF8), count=1)
    model[0].experts.requires_grad_(False)
    quantize_weights(model, refresh=False)
    shard(model, mesh)
    refresh(model)
    forward(model, data().requires_grad_()).float().sum().backward()
    executed = {(key[0], key[2]) for key in model[0].proj.recipe.backend.ledger.executed}
    assert ("0.experts.down_proj", "wgrad") not in executed
    assert ("0.experts.down_proj", "dgrad") in executed
    assert model[0].experts.down_proj.grad is None
    assert model[0].proj.weight.grad is not None


def test_optimizer_state_is_plain_fp32_on_the_shards(mesh):
    model = sharded(FLOOR, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    forward(model, data()).float().sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            assert type(plain(state[key])) is torch.Tensor
            assert state[key].dtype is torch.float32
