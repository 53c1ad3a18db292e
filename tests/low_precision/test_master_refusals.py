"""Only known ops run on a weight at rest: each way to a high-precision GEMM raises, in-place and `out=` ones too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.policies import FLOOR, linear, policy
from torch import nn

from quaver.errors import StaleWeightError
from quaver.low_precision import MasterWeight, quantize_weights, replace_low_precision_linear

aten = torch.ops.aten
FQN = "model.layers.0.mlp.up_proj"


def weight(requires_grad=False) -> MasterWeight:
    """[64, 64]"""
    torch.manual_seed(0)
    return linear(FLOOR, torch.randn(64, 64), None, fqn=FQN).weight.requires_grad_(requires_grad)


def a(*shape):
    return torch.randn(*(shape or (64, 64)))


def b():
    return torch.randn(1, 64, 64)


def sdpa(w):
    return F.scaled_dot_product_attention(a(1, 1, 64, 64), w[None, None], a(1, 1, 64, 64))


GEMMS = {
    "mm out": lambda w: torch.mm(a(), w, out=a()),
    "matmul out": lambda w: torch.matmul(a(), w, out=a()),
    "addmm out": lambda w: torch.addmm(a(), a(), w, out=a()),
    "bmm out": lambda w: torch.bmm(b(), w[None], out=b()),
    "baddbmm out": lambda w: torch.baddbmm(b(), b(), w[None], out=b()),
    "mv out": lambda w: torch.mv(w, a(64), out=a(64)),
    "dot out": lambda w: torch.dot(w[0], a(64), out=torch.zeros(())),
    "linear out": lambda w: aten.linear.out(a(), w, None, out=a()),
    "into the weight": lambda w: torch.mm(a(), a(), out=w),
    "mm dtype": lambda w: torch.mm(a(), w, out_dtype=torch.float32),
    "addmm_": lambda w: a().addmm_(a(), w),
    "addmm_ into the weight": lambda w: w.addmm_(a(), a()),
    "baddbmm_": lambda w: b().baddbmm_(b(), w[None]),
    "addbmm_": lambda w: a().addbmm_(b(), w[None]),
    "addmv_": lambda w: a(64).addmv_(w, a(64)),
    "addr_": lambda w: w.addr_(a(64), a(64)),
    "vdot": lambda w: torch.vdot(w[0], a(64)),
    "_addmm_activation": lambda w: torch._addmm_activation(a(64), a(), w, use_gelu=True),
    "cdist": lambda w: torch.cdist(a(3, 64), w),
    "cdist large": lambda w: torch.cdist(a(3, 64), w, compute_mode="use_mm_for_euclid_dist"),
    "chain_matmul": lambda w: torch.chain_matmul(a(), w),
    "matrix_power": lambda w: torch.linalg.matrix_power(w, 2),
    "matrix_exp": lambda w: torch.matrix_exp(w),
    "sparse mm": lambda w: torch.sparse.mm(a().to_sparse(), w),
    "attention": sdpa,
    "einsum": lambda w: torch.einsum("tk,nk->tn", a(), w),
    "embedding": lambda w: F.embedding(torch.tensor([1]), w),
    "layer_norm": lambda w: F.layer_norm(w, (64,)),
    "softmax": lambda w: w.softmax(-1),
    "solve": lambda w: torch.linalg.solve(w, a()),
    "svd": lambda w: torch.linalg.svdvals(w),
    "lstm": lambda w: aten.lstm.input(
        b(), [a(1, 1, 16), a(1, 1, 16)], [w, a(64, 16)], False, 1, 0.0, False, False, True
    ),
    "fused qkv": lambda w: F.linear(a(), torch.cat([w, w])),
    "stacked": lambda w: torch.bmm(a(2, 64, 64), torch.stack([w, w])),
    "rows": lambda w: a(4, 2) @ w[torch.tensor([3, 5])],
    "masked rows": lambda w: a(4, 10) @ w[torch.arange(64) < 10],
    "fast MHA": lambda w: torch._native_multi_head_attention(
        b(), b(), b(), 64, 4, a(192, 64), a(192), w, a(64)
    ),
    "set_": lambda w: w.set_(a()),
    "t_": lambda w: w.t_(),
    "resize_": lambda w: w.resize_(32, 128),
}  # fmt: skip
NO_GRAD = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", list(NO_GRAD))
@pytest.mark.parametrize("name", list(GEMMS))
def test_an_op_that_is_not_known_raises_with_its_name(name, mode):
    w = weight()
    before = w.master.clone()
    with (
        NO_GRAD[mode](),
        pytest.raises(
            StaleWeightError,
            match=rf"(?s)^aten\.\w+\.\w+ is not allowed.*in high precision.*{FQN}\.weight.*remedy: ",
        ),
    ):
        GEMMS[name](w)
    assert torch.equal(w.master, before)
    assert not w.stale


@pytest.mark.parametrize("name", [n for n in GEMMS if "out" not in n and n != "into the weight"])
def test_an_op_that_is_not_known_raises_where_autograd_records(name):
    w = weight(requires_grad=True)
    with pytest.raises((StaleWeightError, RuntimeError)) as raised:
        GEMMS[name](w)
    # where a leaf is written in place torch itself is first; all else is ours
    first = name in ("addmm_ into the weight", "addr_", "set_", "t_", "resize_")
    assert isinstance(raised.value, StaleWeightError) or first


def encoder(**options) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, **options)
    bound = policy(FLOOR)
    for name in ("linear1", "linear2"):
        setattr(layer, name, replace_low_precision_linear(getattr(layer, name), fqn=name, policy=bound))
    quantize_weights(layer)
    return layer


def test_the_fused_encoder_layer_is_refused_and_its_remedy_works():
    layer, x = encoder(), a(2, 8, 64)
    wanted = layer(x)
    assert layer.linear1.recipe.backend.ledger.executed.total() == 2
    layer.eval()
    with torch.no_grad():
        with pytest.raises(
            StaleWeightError, match=r"(?s)_transformer_encoder_layer_fwd.*linear1\.weight.*set_fastpath"
        ):
            layer(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(layer(x), wanted)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("training", [True, False])
def test_attention_with_a_quantised_output_projection_is_refused(training):
    attention = nn.MultiheadAttention(64, 4, batch_first=True)
    attention.out_proj = replace_low_precision_linear(
        attention.out_proj, fqn="out_proj", policy=policy(FLOOR)
    )
    quantize_weights(attention)
    attention.train(training)
    x = a(2, 8, 64)
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(StaleWeightError, match=r"out_proj\.weight"):
            attention(x, x, x, need_weights=False)


ALLOWED = {
    "add": lambda w: w + w,
    "scaled": lambda w: (w / w.abs().amax()).clamp(-1, 1).round(),
    "rms": lambda w: w.square().mean().sqrt(),
    "penalty": lambda w: F.mse_loss(w, torch.zeros(64, 64)),
    "fro": lambda w: torch.linalg.matrix_norm(w),
    "std": lambda w: torch.stack(torch.std_mean(w)),
    "topk": lambda w: w.abs().view(-1).topk(5).values,
    "histc": lambda w: w.histc(10),
    "sort": lambda w: w.flatten().sort().values,
    "quantile": lambda w: w.quantile(0.5),
    "cumsum": lambda w: w.cumsum(0),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "tril": lambda w: w.tril(),
    "rows": lambda w: w[torch.tensor([1, 2])],
    "isclose": lambda w: torch.isclose(w, w).float(),
    "normalize": lambda w: F.normalize(w, dim=1),
    "cosine": lambda w: F.cosine_similarity(w, w.flip(0)),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "foreach": lambda w: torch.stack(torch._foreach_norm([w, w])),
    "repeat": lambda w: w.repeat(2, 1),
}


@pytest.mark.parametrize("mode", [*NO_GRAD, "grad"])
@pytest.mark.parametrize("name", list(ALLOWED))
def test_what_is_read_is_what_the_plain_master_gives(name, mode):
    w = weight()
    with NO_GRAD.get(mode, torch.enable_grad)():
        found, wanted = ALLOWED[name](w), ALLOWED[name](w.master)
    found = found.master if isinstance(found, MasterWeight) else found
    assert torch.equal(found, wanted)
    assert not w.stale


def test_a_penalty_on_weights_has_its_gradient():
    w = weight(requires_grad=True)
    plain = w.master.clone().requires_grad_()
    for each in (w, plain):
        (
            each.square().sum() + each.abs().mean() + each.norm() + F.mse_loss(each, torch.ones(64, 64))
        ).backward()
    assert type(w.grad) is torch.Tensor
    assert torch.equal(w.grad, plain.grad)


INITIALISERS = {
    "uniform_": {},
    "normal_": {},
    "trunc_normal_": {},
    "constant_": {"val": 0.5},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
    "orthogonal_": {},
    "sparse_": {"sparsity": 0.5},
}


@pytest.mark.parametrize("name", list(INITIALISERS))
def test_initialisers_write_what_they_write_to_a_plain_tensor(name):
    w, plain = weight(), torch.zeros(64, 64)
    for each in (w, plain):
        torch.manual_seed(3)
        getattr(nn.init, name)(each, **INITIALISERS[name])
    assert torch.equal(w.master, plain)
    assert w.stale


def test_compiling_names_the_weight():
    model = nn.Sequential(linear(FLOOR, torch.randn(64, 64), None, fqn=FQN))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=rf"(?s)torch\.compile cannot trace.*{FQN}\.weight.*eagerly"):
        torch.compile(model, backend="eager")(a(4, 64))
    assert model(a(4, 64)).shape == (4, 64)
