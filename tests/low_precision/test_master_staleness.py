"""A quantised weight is never read stale, never replaced behind its back, never computed with in high precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.policies import FLOOR, FORMATS, linear, policy
from torch import nn

from quaver.errors import PlanError, StaleWeightError
from quaver.low_precision import (
    LowPrecisionLinear,
    MasterWeight,
    quantised_weights,
    quantize_weights,
    refresh,
    refresh_low_precision_weights,
    refresh_stale,
    replace_low_precision_linear,
)

FQN = "model.layers.0.mlp.up_proj"


def module_of(recipe_id=FLOOR, **kwargs) -> LowPrecisionLinear:
    torch.manual_seed(0)
    return linear(recipe_id, torch.randn(96, 64), torch.randn(96), fqn=FQN, **kwargs)


def x():
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def full():
    return torch.full((96, 64), 0.5)


def adamw_arguments(weight):
    """The schema of the fused kernel: parameters, moments and steps are lists that it writes."""
    grads, zeros = [torch.ones(96, 64)], [torch.zeros(96, 64)]
    torch._fused_adamw_(
        [weight], grads, zeros, [torch.zeros(96, 64)], [], [torch.tensor(1.0)],
        lr=0.1, beta1=0.9, beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


WRITES = {
    "mul_": lambda w: w.mul_(2),
    "copy_": lambda w: w.copy_(full()),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(0.25),
    "add_": lambda w: w.add_(full(), alpha=0.1),
    "lerp_": lambda w: w.lerp_(full(), 0.5),
    "addcmul_": lambda w: w.addcmul_(full(), full(), value=0.1),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "normal_": lambda w: nn.init.normal_(w),
    "kaiming": lambda w: nn.init.kaiming_uniform_(w),
    "masked_fill_": lambda w: w.masked_fill_(full() > 0, 3.0),
    "setitem": lambda w: w.__setitem__((3, slice(None)), 7.0),
    "setitem mask": lambda w: w.__setitem__(torch.arange(96) > 90, 7.0),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([2]), full()[:1]),
    "index_put_": lambda w: w.index_put_((torch.tensor([1]), torch.tensor([1])), torch.tensor(9.0)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, 64, dtype=torch.int64), full()[:1]),
    "out=": lambda w: torch.mul(full(), 2, out=w),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 2),
    "foreach lists": lambda w: torch._foreach_add_([w], [full()], alpha=0.5),
    "fused adamw": adamw_arguments,
    "row view": lambda w: w[0].mul_(3),
    "slice of slice": lambda w: w[8:40][3:5].zero_(),
    "view": lambda w: w.view(-1).mul_(2),
    "part of a view": lambda w: w.view(-1)[:5].mul_(2),
    "detach": lambda w: w.detach().mul_(2),
    "data": lambda w: w.data.mul_(2),
    "part of data": lambda w: w.data[5].mul_(2),
    "chunk": lambda w: w.chunk(4)[2].zero_(),
    "split": lambda w: w.split(32)[1].mul_(2),
    "unbind": lambda w: w.unbind(0)[7].mul_(2),
    "narrow": lambda w: w.narrow(1, 3, 4).zero_(),
    "diagonal": lambda w: w.diagonal().zero_(),
    "as_strided": lambda w: w.as_strided((2, 2), (1, 1)).zero_(),
    "unflatten": lambda w: w.unflatten(0, (3, 32))[1].zero_(),
    "the plain master": lambda w: w.master.mul_(2),
    "part of the plain master": lambda w: w.master[4:6].zero_(),
    "master of an alias": lambda w: w.detach().master.mul_(2),
}


@pytest.mark.parametrize("name", list(WRITES))
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_every_write_makes_the_codes_stale_and_a_refresh_sees_it(recipe_id, name):
    module = module_of(recipe_id)
    before = module(x())
    with torch.no_grad():
        WRITES[name](module.weight)
    assert module.weight.stale
    with pytest.raises(StaleWeightError, match=rf"(?s)written since.*where: {FQN}\.weight.*quaver\.refresh"):
        module(x())
    assert refresh(module) == [f"{FQN}.weight"]
    assert not torch.equal(module(x()), before)
    assert torch.equal(module(x()), linear(recipe_id, module.weight.master, module.bias)(x()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_inplace_op_hands_the_weight_itself_back(mode):
    module = module_of()
    with mode():
        assert module.weight.mul_(2) is module.weight
        assert isinstance(module.weight[3].mul_(2), MasterWeight)
        module.weight.mul_(2).add_(1)
    assert module.weight.state.writes == 4


def test_several_written_arguments_are_all_counted():
    a, b = module_of(), module_of()
    with torch.no_grad():
        torch._foreach_mul_([a.weight, b.weight], 2)
    assert a.weight.stale
    assert b.weight.stale


READS = {
    "sum": lambda w: w.sum(),
    "norm": lambda w: w.norm(),
    "mul": lambda w: w * 2,
    "clone": lambda w: w.clone(),
    "write to a clone": lambda w: w.clone().mul_(2),
    "index": lambda w: w[3, 4].item(),
    "view": lambda w: w.view(-1),
    "zeros_like": lambda w: torch.zeros_like(w),
    "empty_like": lambda w: torch.empty_like(w).zero_(),
    "isfinite": lambda w: w.isfinite().all(),
    "repr": lambda w: repr(w),
    "foreach": lambda w: torch._foreach_norm([w]),
    "copy from": lambda w: torch.zeros(96, 64).copy_(w),
    "out=": lambda w: torch.add(w, 1, out=torch.empty(96, 64)),
}


@pytest.mark.parametrize("name", list(READS))
def test_reading_makes_nothing_stale(name):
    module = module_of()
    with torch.no_grad():
        READS[name](module.weight)
    assert not module.weight.stale


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_write_through_state_dict_is_seen(recipe_id):
    """state_dict hands out plain tensors that share the master's memory, as torch's does."""
    module = module_of(recipe_id)
    module.state_dict()["weight"][5].zero_()
    with pytest.raises(StaleWeightError):
        module(x())
    refresh(module)
    assert torch.equal(module(x())[:, 5].float(), module.bias[5].bfloat16().float().expand(4))


def test_a_weight_that_was_never_quantised_says_so():
    module = replace_low_precision_linear(nn.Linear(64, 96), fqn=FQN, policy=policy(FLOOR))
    quantize_weights(module, refresh=False)
    assert isinstance(module.weight, MasterWeight)
    with pytest.raises(StaleWeightError, match=rf"(?s)has not been quantised yet.*{FQN}"):
        module(x())


def test_writing_the_old_parameter_is_seen():
    """The master shares its memory with the Parameter that it was made from, which an optimiser may still hold."""
    source = nn.Linear(64, 96)
    old = source.weight
    module = replace_low_precision_linear(source, fqn=FQN, policy=policy(FLOOR))
    quantize_weights(module)
    with torch.no_grad():
        old.mul_(2)
    with pytest.raises(StaleWeightError):
        module(x())


def autocast_linear(w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(torch.randn(4, 64), w)


def inference_linear(w):
    with torch.inference_mode():
        return F.linear(torch.randn(4, 64), w)


HIGH_PRECISION = {
    "F.linear": lambda w: F.linear(torch.randn(4, 64), w),
    "F.linear under autocast": autocast_linear,
    "F.linear in inference": inference_linear,
    "w.T": lambda w: torch.randn(4, 64) @ w.T,
    "w.mT": lambda w: torch.randn(4, 64) @ w.mT,
    "w.t()": lambda w: torch.randn(4, 64) @ w.t(),
    "matmul": lambda w: torch.matmul(torch.randn(2, 4, 96), w),
    "mm": lambda w: torch.mm(torch.randn(4, 96), w),
    "left": lambda w: w @ torch.randn(64, 4),
    "mv": lambda w: w @ torch.randn(64),
    "addmm": lambda w: torch.addmm(torch.zeros(64), torch.randn(4, 96), w),
    "bmm": lambda w: torch.bmm(torch.randn(1, 4, 96), w.unsqueeze(0)),
    "baddbmm": lambda w: torch.baddbmm(torch.zeros(1, 4, 64), torch.randn(1, 4, 96), w.unsqueeze(0)),
    "addbmm": lambda w: torch.addbmm(torch.zeros(4, 64), torch.randn(1, 4, 96), w.unsqueeze(0)),
    "einsum": lambda w: torch.einsum("tk,nk->tn", torch.randn(4, 64), w),
    "tensordot": lambda w: torch.tensordot(torch.randn(4, 64), w, dims=([1], [1])),
    "inner": lambda w: torch.inner(torch.randn(4, 64), w),
    "multi_dot": lambda w: torch.linalg.multi_dot([torch.randn(4, 96), w, torch.randn(64, 4)]),
    "conv1d": lambda w: F.conv1d(torch.randn(1, 64, 5), w.unsqueeze(-1)),
    "bilinear": lambda w: F.bilinear(torch.randn(4, 64), torch.randn(4, 96), w.t().unsqueeze(0)),
    "detached": lambda w: torch.randn(4, 96) @ w.detach(),
    "data": lambda w: torch.randn(4, 96) @ w.data,
    "a clone": lambda w: torch.randn(4, 96) @ w.clone(),
    "half of it": lambda w: torch.randn(4, 48) @ w[:48],
    "a bfloat16 copy": lambda w: w.to(torch.bfloat16),
    "a half copy": lambda w: w.half(),
    "a double copy": lambda w: w.double(),
    "like another": lambda w: w.type_as(torch.zeros(1, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", list(HIGH_PRECISION))
def test_no_gemm_computes_with_the_master_in_silence(name, grad):
    module = module_of()
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(StaleWeightError, match=rf"(?s)in high precision.*{FQN}\.weight.*low-precision module"),
    ):
        HIGH_PRECISION[name](module.weight)
    assert F.linear(torch.randn(4, 64), module.weight.master).shape == (4, 96)  # where it is meant


def test_assigning_data_raises():
    module = module_of()
    for value in (full(), module.weight.data, torch.zeros(1)):
        with pytest.raises(StaleWeightError, match=rf"(?s)p\.data = .*{FQN}\.weight.*in place"):
            module.weight.data = value
    assert torch.equal(module(x()), module_of()(x()))


@pytest.mark.parametrize("move", ["bfloat16", "half", "double"])
def test_a_dtype_move_raises_and_leaves_the_weight_as_it_was(move):
    module, before = module_of(), module_of()(x())
    with pytest.raises(StaleWeightError, match=rf"(?s)drop its FP32 master.*{FQN}\.weight"):
        getattr(module, move)()
    with pytest.raises(StaleWeightError):
        module.to(getattr(torch, move))
    assert torch.equal(module(x()), before)
    assert module.float() is module  # what it is already
    assert module.to("cpu") is module
    assert torch.equal(module(x()), before)


def test_a_move_to_another_device_keeps_parameter_ties_and_gradient():
    """On the meta device, which every machine has; a real one refreshes at once."""
    bound = policy(FLOOR)
    a, b = (
        replace_low_precision_linear(nn.Linear(64, 64, bias=False), fqn=name, policy=bound) for name in "ab"
    )
    b.weight = a.weight
    pair = nn.ModuleList([a, b])
    quantize_weights(pair)
    weight = a.weight
    weight.grad = torch.ones(64, 64)
    pair.to("meta")
    assert a.weight is b.weight is weight
    assert isinstance(weight, MasterWeight)
    assert isinstance(weight, nn.Parameter)
    assert weight.is_meta
    assert weight.master.is_meta
    assert weight.grad.is_meta
    assert weight.stale


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_deep_copy_has_its_own_master_codes_and_ledger(recipe_id):
    module = module_of(recipe_id)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x()), module(x()))
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad == module.weight.requires_grad
    mine = {t.data_ptr() for t in (module.weight.master, *module.weight.physical.values())}
    theirs = {t.data_ptr() for t in (twin.weight.master, *twin.weight.physical.values())}
    assert not mine & theirs
    assert twin.weight.state is not module.weight.state
    assert twin.recipe is twin.weight.spec.recipe
    assert twin.recipe.backend is not module.recipe.backend
    counted = sum(module.recipe.backend.ledger.executed.values())
    before = module(x())
    with torch.no_grad():
        twin.weight.zero_()
    assert not module.weight.stale
    assert torch.equal(module(x()), before)
    refresh(twin)
    assert torch.equal(twin(x()), twin.bias.bfloat16().expand(4, 96))
    assert sum(module.recipe.backend.ledger.executed.values()) == counted + 2


def test_a_deep_copy_of_a_stale_weight_is_stale():
    module = module_of()
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(StaleWeightError):
        copy.deepcopy(module)(x())


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_refresh_between_forward_and_backward_raises(recipe_id):
    module = module_of(recipe_id)
    y = module(x().requires_grad_())
    refresh(module)
    with pytest.raises(StaleWeightError, match=rf"(?s)between forward and backward.*{FQN}\.weight"):
        y.float().sum().backward()


def test_a_write_between_forward_and_backward_raises():
    """Through the Parameter torch itself sees it, through a plain alias the stale codes do."""
    writes = {
        "modified by an inplace operation": lambda module: module.weight.mul_(2),
        "written since": lambda module: module.state_dict()["weight"].mul_(2),
    }
    for words, write in writes.items():
        module = module_of()
        y = module(x().requires_grad_())
        with torch.no_grad():
            write(module)
        with pytest.raises((RuntimeError, StaleWeightError), match=words):
            y.float().sum().backward()


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_weight_tied_across_two_modules_is_one_weight(recipe_id):
    bound = policy(recipe_id)
    a, b = (
        replace_low_precision_linear(nn.Linear(64, 64, bias=False), fqn=name, policy=bound) for name in "ab"
    )
    b.weight = a.weight
    pair = nn.ModuleList([a, b])
    assert quantize_weights(pair) == ["a.weight"]
    assert a.weight is b.weight
    assert list(quantised_weights(pair)) == ["a.weight"]
    assert len(list(pair.parameters())) == 1
    inputs = torch.randn(8, 64).bfloat16()
    b(F.silu(a(inputs))).float().pow(2).mean().backward()
    both = a.weight.grad.clone()
    alone = [linear(recipe_id, a.weight.master, fqn=name) for name in "ab"]
    alone[1](F.silu(alone[0](inputs))).float().pow(2).mean().backward()
    assert torch.equal(both, alone[1].weight.grad + alone[0].weight.grad)
    torch.optim.AdamW(pair.parameters(), lr=1e-2, fused=True).step()
    for part in (a, b):
        with pytest.raises(StaleWeightError):
            part(inputs)
    assert refresh_stale(pair, after_step=True) == ["a.weight"]
    assert torch.equal(a(inputs), b(inputs))
    assert a.weight.state.refreshes == 1


def test_a_weight_shared_with_a_module_in_high_precision_is_refused():
    embedding, head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
    head.weight = embedding.weight
    module = replace_low_precision_linear(head, fqn="lm_head", policy=policy(FLOOR))
    model = nn.ModuleDict({"embed": embedding, "lm_head": module})
    with pytest.raises(PlanError, match=r"(?s)shared with embed\.weight.*lm_head\.weight"):
        quantize_weights(model)
    assert type(module.weight) is nn.Parameter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "meta"])
def test_only_materialised_fp32_is_quantised(dtype):
    source = nn.Linear(64, 96, **({"device": "meta"} if dtype == "meta" else {"dtype": dtype}))
    module = replace_low_precision_linear(source, fqn=FQN, policy=policy(FLOOR))
    with pytest.raises(PlanError, match=rf"(?s){'on meta' if dtype == 'meta' else dtype}.*{FQN}\.weight"):
        quantize_weights(module)


def test_refreshing_a_model_without_quantised_weights_is_an_error():
    with pytest.raises(PlanError, match="no quantised weight"):
        refresh(nn.Linear(4, 4))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_refresh_from_masters_pair_by_pair(recipe_id):
    """The interface for an optimiser that keeps its masters elsewhere: weights at rest and in flight."""
    module, master = module_of(recipe_id), torch.randn(96, 64)
    flight = module.recipe.weight_class.from_master(torch.zeros(96, 64), module.weight.spec)
    refresh_low_precision_weights([module.weight, flight], [master, master])
    wanted = linear(recipe_id, master).weight
    for side in ("row", "col"):
        for weight in (module.weight, flight):
            assert torch.equal(weight.select(side).data, wanted.select(side).data)
            assert torch.equal(weight.select(side).scale, wanted.select(side).scale)
    assert module.weight.state.refreshes == 1
    assert flight.version == 1
    with pytest.raises(ValueError, match="2 weights but 1 masters"):
        refresh_low_precision_weights([module.weight, flight], [master])
    with pytest.raises(ValueError, match=r"(?s)\(96, 32\).*\(96, 64\)"):
        refresh_low_precision_weights([flight], [master[:, :32]])
    with pytest.raises(ValueError, match=r"(?s)bfloat16.*FP32 master"):
        refresh_low_precision_weights([flight], [master.bfloat16()])
