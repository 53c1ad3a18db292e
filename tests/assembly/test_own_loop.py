"""Eight-bit training without the trainer: a plain MLP, a user's own fully_shard, and what may go wrong."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import quaver
from quaver.distributed import init_world, shard_mesh
from quaver.errors import PlanError, StaleWeightError
from quaver.low_precision import LowPrecisionLinear, MasterWeight

RULE = quaver.ReplacementRule("layers.*", nn.Linear, "low_precision_linear")
CONFIGS = {
    "mxfp8": quaver.LowPrecisionConfig(enabled=True),
    "hif8": quaver.LowPrecisionConfig(enabled=True, format="hif8", scaling="current"),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
FUSED = {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 64)])
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return self.head(x.to(self.head.weight.dtype))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def loss_of(model, step: int) -> torch.Tensor:
    return model(inputs(step)).float().pow(2).mean()


def train(model, optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand(fmt: str, steps: int, kwargs: dict) -> list[float]:
    """The same layers; masters, moments and refresh written out, on plain FP32 parameters."""
    quantised = quaver.quantize_modules(MLP(), CONFIGS[fmt], plan=[RULE]).model
    names = [name for name, p in quantised.named_parameters()]
    plain = {
        n: nn.Parameter(p.master.clone() if isinstance(p, MasterWeight) else p.detach().clone())
        for n, p in quantised.named_parameters()
    }
    optimizer = torch.optim.AdamW([plain[n] for n in names], lr=1e-2, **kwargs)
    losses = []
    for step in range(steps):
        loss = loss_of(quantised, step)
        loss.backward()
        for name, parameter in quantised.named_parameters():
            plain[name].grad = parameter.grad.clone()
        optimizer.step()
        quantised.zero_grad()
        with torch.no_grad():
            for name, parameter in quantised.named_parameters():
                parameter.copy_(plain[name])
        quaver.refresh(quantised)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
@pytest.mark.parametrize("kind", list(FUSED))
def test_plain_mlp_equals_a_hand_written_loop(fmt: str, kind: str) -> None:
    model = MLP()
    quantised = quaver.quantize_modules(model, CONFIGS[fmt], plan=[RULE])
    assert quantised.replacements == [{"pattern": "layers.*", "hits": ["layers.0", "layers.1"]}]
    assert all(type(layer) is LowPrecisionLinear for layer in model.layers)
    assert type(model.head) is nn.Linear
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **FUSED[kind])
    quaver.attach(optimizer, model)
    codes = [next(iter(layer.weight.physical.values())).clone() for layer in model.layers]
    losses = []
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        fresh = [next(iter(layer.weight.physical.values())).clone() for layer in model.layers]
        assert not any(torch.equal(a, b) for a, b in zip(codes, fresh)), "codes did not change with the step"
        codes = fresh
    assert losses == by_hand(fmt, 4, FUSED[kind])
    assert quantised.refresh_counts == {"layers.0.weight": 4, "layers.1.weight": 4}
    assert quantised.ledger.executed.total() == 4 * (3 + 2)  # the first layer's input wants no gradient


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
@pytest.mark.parametrize("reshard", [True, False])
def test_under_a_users_own_fully_shard_the_bits_are_the_same(fmt: str, reshard: bool) -> None:
    plain = MLP()
    quaver.quantize_modules(plain, CONFIGS[fmt], plan=[RULE])
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    quaver.attach(reference, plain)
    init_world()
    model = MLP()
    quantised = quaver.quantize_modules(model, CONFIGS[fmt], plan=[RULE])
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh(None), mp_policy=BF16, reshard_after_forward=reshard)
    fully_shard(model.head, mesh=shard_mesh(None))  # FP32, as in the plain model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    quaver.attach(optimizer, model)
    # LowPrecisionLinear's bias goes BF16 under FSDP's policy and stays FP32 without it: compare without biases
    for net in (plain, model):
        for layer in net.layers:
            layer.bias.requires_grad_(False)
            local = layer.bias.to_local() if hasattr(layer.bias, "to_local") else layer.bias
            local.detach().zero_()
    with torch.no_grad():
        model(inputs(9))  # leaves a gathered copy behind where nothing is resharded
    assert train(model, optimizer, 3) == train(plain, reference, 3)
    assert set(quantised.refresh_counts.values()) == {3}


def test_forgotten_attach_is_an_error_at_the_next_forward() -> None:
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(StaleWeightError, match=r"layers\.0\.weight") as raised:
        loss_of(model, 1)
    assert "quaver.attach(optimizer, model)" in str(raised.value)


def test_forgotten_attach_under_fully_shard() -> None:
    init_world()
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["hif8"], plan=[RULE])
    fully_shard(model, mesh=shard_mesh(None), mp_policy=BF16)
    with pytest.raises(StaleWeightError, match="never attached"):
        loss_of(model, 0)


def test_attach_before_fully_shard_is_an_error() -> None:
    init_world()
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    optimizer = torch.optim.AdamW(model.parameters())
    quaver.attach(optimizer, model)
    fully_shard(model, mesh=shard_mesh(None), mp_policy=BF16)
    with pytest.raises(StaleWeightError, match="after fully_shard"):
        loss_of(model, 0)
    with pytest.raises(PlanError, match="does not hold 2 trainable quantised weights"):
        optimizer.step()


@pytest.mark.parametrize("whole", [True, False])
def test_fully_shard_before_quantize_modules_is_an_error(whole: bool) -> None:
    init_world()
    model = MLP()
    fully_shard(model if whole else model.layers[1], mesh=shard_mesh(None), mp_policy=BF16)
    before = [id(m) for m in model.modules()]
    with pytest.raises(
        PlanError, match=r"(?s)sharded already.*layers\.\d\.weight.*quantize_modules first"
    ) as raised:
        quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    assert "then fully_shard" in str(raised.value)
    assert [id(m) for m in model.modules()] == before


def test_ddp_before_quantize_modules_is_an_error() -> None:
    """DDP's reducer would go on with the old Parameters: no gradient would be averaged."""
    init_world()
    model = nn.ModuleDict({"net": nn.parallel.DistributedDataParallel(MLP())})
    rule = quaver.ReplacementRule("**.layers.*", nn.Linear, "low_precision_linear")
    with pytest.raises(
        PlanError, match=r"(?s)under DistributedDataParallel.*where: net.*quantize_modules first"
    ):
        quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[rule])


def test_ddp_after_quantising_trains_as_the_plain_model() -> None:
    init_world()
    plain, model = MLP(), MLP()
    for net in (plain, model):
        quaver.quantize_modules(net, CONFIGS["mxfp8"], plan=[RULE])
    parallel = nn.parallel.DistributedDataParallel(model)
    losses = []
    for net, called in ((plain, plain), (model, parallel)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        quaver.attach(optimizer, net)
        losses.append(train(called, optimizer, 3))
    assert losses[0] == losses[1]


def test_an_optimizer_without_a_weight_is_refused() -> None:
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    with pytest.raises(PlanError, match=r"layers\.1\.weight"):
        quaver.attach(torch.optim.AdamW([model.layers[0].weight, model.head.weight]), model)


def test_an_optimizer_built_before_quantising_is_refused() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    with pytest.raises(PlanError, match=r"layers\.0\.weight"):
        quaver.attach(optimizer, model)


def test_frozen_weights_need_no_optimizer_and_are_never_refreshed() -> None:
    model = MLP()
    quantised = quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    model.layers[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    quaver.attach(optimizer, model)
    train(model, optimizer, 2)
    assert quantised.refresh_counts == {"layers.0.weight": 0, "layers.1.weight": 2}


def test_load_state_dict_refreshes() -> None:
    model, other = MLP(), MLP()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    for net in (model, other):
        quaver.quantize_modules(net, CONFIGS["mxfp8"], plan=[RULE])
    state = other.state_dict()
    assert all(type(value) is torch.Tensor and value.dtype is torch.float32 for value in state.values())
    assert not torch.equal(model(inputs(0)), other(inputs(0)))
    model.load_state_dict(state)
    assert torch.equal(model(inputs(0)), other(inputs(0)))


def test_assigning_data_and_moving_dtype_raise() -> None:
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    with pytest.raises(StaleWeightError, match=r"layers\.0\.weight"):
        model.layers[0].weight.data = torch.zeros(96, 64)
    for move in (lambda: model.to(torch.bfloat16), model.half, model.double):
        with pytest.raises(StaleWeightError, match="FP32 master"):
            move()
    assert model.to("cpu") is model


def test_other_dtypes_have_no_master_and_are_refused() -> None:
    model = MLP().bfloat16()
    before = [id(m) for m in model.modules()]
    with pytest.raises(PlanError, match=r"layers\.0\.weight"):
        quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    assert [id(m) for m in model.modules()] == before


def test_disabled_config_and_empty_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="low precision is off"):
        quaver.quantize_modules(MLP(), quaver.LowPrecisionConfig(), plan=[RULE])
    with pytest.raises(PlanError, match="no rule"):
        quaver.quantize_modules(MLP(), CONFIGS["mxfp8"], plan=[])


def test_deepcopy_trains_on_its_own() -> None:
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["hif8"], plan=[RULE])
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    quaver.attach(optimizer, twin)
    before = model(inputs(0))
    train(twin, optimizer, 2)
    assert torch.equal(before, model(inputs(0)))
    assert not torch.equal(before, twin(inputs(0)))


def test_output_dtype_follows_the_input_or_autocast() -> None:
    layer = MLP().layers
    holder = nn.ModuleDict({"layers": layer})
    quaver.quantize_modules(holder, CONFIGS["mxfp8"], plan=[RULE])
    assert layer[0](inputs(0)).dtype is torch.bfloat16
    assert layer[0](inputs(0).float()).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer[0](inputs(0).float()).dtype is torch.bfloat16
    with pytest.raises(PlanError, match="float16 activations"):
        layer[0](inputs(0).half())


def test_removing_the_handle_ends_the_refresh() -> None:
    model = MLP()
    quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
    optimizer = torch.optim.AdamW(model.parameters())
    quaver.attach(optimizer, model).remove()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(StaleWeightError):
        loss_of(model, 1)
