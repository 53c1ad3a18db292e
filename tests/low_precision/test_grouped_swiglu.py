"""The experts' SwiGLU node against a reference built op by op: FP64 GEMMs on independently quantised operands,
torch's own autograd for everything between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.experts import grouped_weight, routing_of
from helpers.oracle import fake_quant
from helpers.policies import FLOOR, FORMATS, RECIPES, policy

from quaver.backends import OperandError
from quaver.errors import StaleWeightError
from quaver.low_precision import low_precision_grouped_swiglu

SITES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
H, FFN = 64, 48
GROUPS = [0, 1, 31, 32, 33]  # rows an expert


def node(x, index, combine, gate_up, down, recipe_id, g, *, frozen=False, bound=None):
    """(y, dx, dcombine, dgate_up, ddown) of the node."""
    bound = policy(recipe_id) if bound is None else bound
    x, combine = x.clone().requires_grad_(), combine.clone().requires_grad_()
    weights = [
        grouped_weight(w, bound, fqn, requires_grad=not frozen) for w, fqn in zip((gate_up, down), SITES)
    ]
    y = low_precision_grouped_swiglu(x, index, combine, *weights, sites=SITES, recipe=bound.recipe)
    y.backward(g)
    return [y.detach(), x.grad, combine.grad, *(w.grad for w in weights)]


def reference(x, index, combine, gate_up, down, recipe_id, g):
    """The same five, step by step; every intermediate is rounded to x's dtype."""
    (T, k), experts, dtype = index.shape, gate_up.shape[0], x.dtype
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.argsort(order)
    stops = torch.bincount(flat, minlength=experts).cumsum(0).tolist()
    spans = list(zip([0, *stops], stops))

    def rows(t):  # quantised along the width: one scale a block of a row, or one for the whole tensor
        return fake_quant(t, 1, recipe_id)

    def per_expert(left, weights, axis):  # [S, .] x each expert's weight, quantised along its contracted axis
        quantised = [fake_quant(w, axis, recipe_id) for w in weights]
        parts = [left[a:b] @ (q.t() if axis == 1 else q) for q, (a, b) in zip(quantised, spans)]
        return torch.cat(parts).to(dtype)

    def along_tokens(t, gradient):  # blocks restart at each expert; HiF8 has one scale for the whole tensor
        if recipe_id.startswith("hif8"):
            return fake_quant(t, 0, recipe_id, gradient=gradient)
        return torch.cat([fake_quant(t[a:b], 0, recipe_id) for a, b in spans])

    def wgrad(gradient, activation):
        g64, a64 = along_tokens(gradient, True), along_tokens(activation, False)
        return torch.stack([g64[a:b].t() @ a64[a:b] for a, b in spans]).to(dtype).float()

    x_S = x[order // k]
    h = per_expert(rows(x_S), gate_up, 1).requires_grad_()
    gate, up = h.chunk(2, -1)
    act = F.silu(gate) * up
    y_S = per_expert(rows(act.detach()), down, 1).requires_grad_()
    weights = combine.clone().requires_grad_()
    out = (y_S[inverse].view(T, k, -1).float() * weights.unsqueeze(-1)).sum(1).to(dtype)
    dy, dcombine = torch.autograd.grad(out, (y_S, weights), g)
    ddown = wgrad(dy, act.detach())
    da = per_expert(fake_quant(dy, 1, recipe_id, gradient=True), down, 0)
    (dh,) = torch.autograd.grad(act, h, da)
    dgate_up = wgrad(dh, x_S)
    dx_S = per_expert(fake_quant(dh, 1, recipe_id, gradient=True), gate_up, 0)
    dx = dx_S[inverse].view(T, k, -1).float().sum(1).to(dtype)
    return [out.detach(), dx, dcombine, dgate_up, ddown]


def data(counts, k, dtype, seed=0):
    torch.manual_seed(seed)
    index, experts = routing_of(counts, k, seed=seed), len(counts)
    tokens = index.shape[0]
    return (
        torch.randn(tokens, H).to(dtype),
        index,
        torch.rand(tokens, k),
        torch.randn(experts, 2 * FFN, H) * 0.2,
        torch.randn(experts, H, FFN) * 0.2,
    ), torch.randn(tokens, H).to(dtype)


def assert_close(found, wanted):
    """Nearly every element bit for bit: the two accumulate in different order, so that a rounding flips now and
    then, and with it a quantum further on. One operand left unquantised would be 2 to 4% off."""
    for name, a, b in zip(["y", "dx", "dcombine", "dgate_up", "ddown"], found, wanted):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        if b.numel() and b.abs().sum() > 0:
            error = (a.double() - b.double()).norm() / b.double().norm()
            assert error < 2e-3, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("counts", "k"), [(GROUPS, 1), ([1, 31, 0, 32, 32], 2), ([24, 24, 24], 6), ([0, 0, 40], 1)], ids=str
)
@pytest.mark.parametrize("recipe_id", RECIPES)
def test_output_and_all_gradients(recipe_id, counts, k, dtype):
    args, g = data(counts, k, dtype)
    found, wanted = node(*args, recipe_id, g), reference(*args, recipe_id, g)
    assert_close(found, wanted)
    if dtype is torch.bfloat16:
        for a, b in zip(found[:2], wanted[:2]):
            assert (a == b).float().mean() > 0.98
    for expert, count in enumerate(counts):
        if count == 0:  # idle: exact zeros, not small numbers
            assert torch.equal(found[3][expert], torch.zeros(2 * FFN, H))
            assert torch.equal(found[4][expert], torch.zeros(H, FFN))


def test_the_reference_would_notice_an_unquantised_operand():
    """Guards the tolerance: quantising along the wrong axis is far outside of it."""
    args, g = data([40, 40], 2, torch.bfloat16)
    wanted = reference(*args, FLOOR, g)
    other = reference(*args, RECIPES[2], g)
    for a, b in zip(wanted, other):
        assert (a.double() - b.double()).norm() / b.double().norm() > 1e-2


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_one_token_equals_itself_in_a_crowd(recipe_id):
    """MXFP8 scales a token by its own blocks, so one token alone gives the row that it has among others."""
    args, g = data([8, 8], 1, torch.bfloat16)
    x, index, combine, gate_up, down = args
    crowd = node(*args, recipe_id, g)
    for t in range(3):
        alone = node(
            x[t : t + 1], index[t : t + 1], combine[t : t + 1], gate_up, down, recipe_id, g[t : t + 1]
        )
        if recipe_id == FLOOR:
            for whole, single in zip(crowd[:3], alone[:3]):
                assert torch.equal(whole[t : t + 1], single)
        assert_close(
            alone,
            reference(
                x[t : t + 1], index[t : t + 1], combine[t : t + 1], gate_up, down, recipe_id, g[t : t + 1]
            ),
        )


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_no_tokens(recipe_id):
    args, g = data([0, 0], 1, torch.bfloat16)
    y, dx, dcombine, dgate_up, ddown = node(*args, recipe_id, g)
    assert y.shape == dx.shape == (0, H)
    assert dcombine.shape == (0, 1)
    assert torch.equal(dgate_up, torch.zeros(2, 2 * FFN, H))
    assert torch.equal(ddown, torch.zeros(2, H, FFN))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_branches_add_up(recipe_id):
    """Top-2 with combine weights (w, 0) is top-1 with w; a token that chooses an expert twice adds its weights."""
    args, g = data([8, 8], 1, torch.bfloat16)
    x, index, combine, gate_up, down = args
    single = node(*args, recipe_id, g)[0]
    other = torch.cat([index, 1 - index], 1), torch.cat([combine, torch.zeros_like(combine)], 1)
    assert torch.equal(node(x, other[0], other[1], gate_up, down, recipe_id, g)[0], single)
    twice = torch.cat([index, index], 1), torch.cat([combine / 2, combine / 2], 1)
    assert torch.equal(node(x, twice[0], twice[1], gate_up, down, recipe_id, g)[0], single)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_the_order_of_tokens_is_no_matter(recipe_id):
    """Sorting by expert is undone exactly: permuted tokens give permuted outputs and input gradients."""
    args, g = data([5, 7, 4], 2, torch.bfloat16)
    x, index, combine, gate_up, down = args
    shuffle = torch.randperm(x.shape[0])
    plain = node(*args, recipe_id, g)
    moved = node(x[shuffle], index[shuffle], combine[shuffle], gate_up, down, recipe_id, g[shuffle])
    for a, b in zip(plain[:3], moved[:3]):
        assert torch.equal(a[shuffle], b)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_frozen_experts_pass_gradients_on_and_get_none(recipe_id):
    args, g = data([5, 7, 4], 2, torch.bfloat16)
    bound = policy(recipe_id)
    trained, frozen = node(*args, recipe_id, g), node(*args, recipe_id, g, frozen=True, bound=bound)
    for a, b in zip(trained[:3], frozen[:3]):
        assert torch.equal(a, b)
    assert frozen[3] is frozen[4] is None
    assert {key[2] for key in bound.backend.ledger.executed} == {"fprop", "dgrad"}


@pytest.mark.parametrize("bad", [-1, 3, 99])
def test_an_expert_index_out_of_range_is_named(bad):
    args, g = data([4, 4, 4], 1, torch.bfloat16)
    args[1][2, 0] = bad
    with pytest.raises(OperandError, match=rf"(?s)expert index {bad} .*0\.\.2.*gate_up_proj"):
        node(*args, FLOOR, g)


def test_misfits_are_named():
    args, g = data([4, 4, 4], 1, torch.bfloat16)
    x, index, combine, gate_up, down = args
    cases = [
        ((x, index.float(), combine, gate_up, down), r"torch\.float32.*gate_up_proj"),
        ((x, index[:5], combine, gate_up, down), r"\(12, 64\).*\(5, 1\).*gate_up_proj"),
        ((x, index, combine[:, 0], gate_up, down), r"\(12, 1\).*\(12,\).*gate_up_proj"),
        ((x[:, :32], index, combine, gate_up, down), r"\(12, 32\), wanted \[T, 64\].*gate_up_proj"),
        ((x, index, combine, gate_up, down[:, :, :32]), r"\(3, 64, 32\) does not fit.*down_proj"),
        ((x, index, combine, gate_up, down[:2]), r"\(2, 64, 48\) does not fit.*down_proj"),
    ]
    for case, words in cases:
        with pytest.raises(OperandError, match=f"(?s){words}"):
            node(*case, FLOOR, g)


@pytest.mark.parametrize("name", SITES)
def test_a_refresh_between_forward_and_backward_is_refused(name):
    args, g = data([4, 4], 1, torch.bfloat16)
    bound = policy(FLOOR)
    weights = {fqn: grouped_weight(w, bound, fqn) for w, fqn in zip(args[3:], SITES)}
    y = low_precision_grouped_swiglu(*args[:3], *weights.values(), sites=SITES, recipe=bound.recipe)
    weights[name].refresh()
    with pytest.raises(StaleWeightError, match=rf"(?s)between forward and backward.*{name}"):
        y.backward(g)


def test_idle_experts_are_noted():
    args, g = data([4, 0, 4], 1, torch.bfloat16)
    bound = policy(FLOOR)
    node(*args, FLOOR, g, bound=bound)
    assert bound.backend.ledger.idle_experts() == ["mlp.experts[1]"]


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_second_derivative_is_refused(recipe_id):
    args, _ = data([4, 4], 1, torch.bfloat16)
    bound = policy(recipe_id)
    weights = [grouped_weight(w, bound, fqn) for w, fqn in zip(args[3:], SITES)]
    x = args[0].requires_grad_()
    y = low_precision_grouped_swiglu(x, *args[1:3], *weights, sites=SITES, recipe=bound.recipe)
    (dx,) = torch.autograd.grad(y.float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (x.sum() + dx.float().pow(2).sum()).backward()
