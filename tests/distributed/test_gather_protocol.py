"""The gather protocol, first with a tensor that knows nothing of formats, then with both formats' shards."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from helpers.oracle import decode
from helpers.policies import FLOOR, FORMATS, HIF8, policy
from helpers.sharding import shard
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from quaver.distributed import (
    PARAMS_BF16,
    FSDPBinding,
    FSDPExtension,
    FSDPGatherContext,
    GatherError,
    GatherMetadata,
    bind,
    check_outputs,
    is_sharded,
    lazy_init,
    schema_of,
    shard_module,
)
from quaver.distributed.gather import check_own_part
from quaver.errors import CapabilityError, PlanError, StaleWeightError
from quaver.low_precision import (
    HiF8Tensor,
    MasterWeight,
    MXFP8Tensor,
    WeightSpec,
    quantize_weights,
    replace_low_precision_linear,
)

aten = torch.ops.aten


class TwoPart(FSDPExtension, torch.Tensor):
    """An FP32 matrix that is sent as its BF16 rounding and what the rounding lost: two dtypes, two shapes.

    The rest is sent as one FP32 sum a row, so that the whole is plain arithmetic: high + rest / width.
    """

    fsdp_binding = None

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)

    def __init__(self, value):
        self.value = value

    def parts(self):
        high = self.value.bfloat16()
        return {"high": high, "rest": (self.value - high.float()).sum(1)}

    def pre_all_gather(self, context, logical_shape, world_size):
        fields = self.parts()
        return tuple(fields.values()), GatherMetadata(schema_of(fields), tuple(logical_shape), world_size, 0)

    def post_all_gather(self, outputs, metadata, out=None, dtype=torch.bfloat16):
        fields = check_outputs(outputs, metadata, "two")
        whole = (fields["high"].float() + fields["rest"].unsqueeze(1) / metadata.logical_shape[1]).bfloat16()
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return out
        return whole

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kinds = {aten.detach, aten.view, aten.slice, aten.split, aten.new_zeros, aten.narrow, aten.as_strided}
        unwrap = torch.utils._pytree.tree_map_only(cls, lambda t: t.value, (args, kwargs or {}))
        result = func(*unwrap[0], **unwrap[1])
        if func.overloadpacket is aten.copy_:
            return args[0]
        return (
            torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)
            if func.overloadpacket in kinds
            else result
        )


class OnlyPre(TwoPart):
    post_all_gather = None


class OnlyPost(TwoPart):
    pre_all_gather = None


def two_part_model(kind=TwoPart):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    reference = [p.detach().clone() for p in model.parameters()]
    model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
    return model, reference


@pytest.mark.parametrize("reshard", [True, False])
def test_a_tensor_of_two_parts_goes_through_and_plain_ones_go_beside_it(reshard, mesh):
    model, (w0, b0, w1, b1) = two_part_model()
    shard_module(model, mesh, reshard_after_forward=reshard, mp_policy=PARAMS_BF16)
    assert is_sharded(model)
    assert bind(model) == ["0.weight"]
    x = torch.randn(4, 32).bfloat16()
    part = TwoPart(w0).parts()
    whole = (part["high"].float() + part["rest"].unsqueeze(1) / 32).bfloat16()
    for _ in range(2):
        y = model(x)
        wanted = nn.functional.linear(
            nn.functional.linear(x, whole, b0.bfloat16()), w1.bfloat16(), b1.bfloat16()
        )
        assert torch.equal(y, wanted)
        y.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32


@pytest.mark.parametrize(("kind", "missing"), [(OnlyPre, "post_all_gather"), (OnlyPost, "pre_all_gather")])
def test_half_a_protocol_is_named(kind, missing, mesh):
    model, _ = two_part_model(kind)
    shard_module(model, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
    with pytest.raises(PlanError, match=rf"(?s){kind.__name__} lacks {missing}.*0\.weight.*both halves"):
        bind(model)


def test_plain_models_are_untouched(mesh):
    """No extension, nothing bound, and the outputs of torch's own path."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    assert not is_sharded(model)
    lazy_init(model)  # nothing to do
    shard(model, mesh)
    assert bind(model) == []
    assert model(torch.randn(2, 32).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("policy_value", [None, 2, "yes"])
def test_reshard_is_true_or_false(policy_value, mesh):
    with pytest.raises(PlanError, match=r"(?s)true or false only.*fsdp_config\.reshard_after_forward"):
        shard_module(nn.Linear(4, 4), mesh, reshard_after_forward=policy_value, mp_policy=PARAMS_BF16)


def test_only_dimension_zero_is_sharded(mesh):
    model = nn.Sequential(replace_low_precision_linear(nn.Linear(64, 96), fqn="0", policy=policy(FLOOR)))
    quantize_weights(model, refresh=False)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    with pytest.raises(PlanError, match=r"(?s)sharded on dimension 1.*0\.weight.*shard_placement_fn"):
        bind(model)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.0.0"])
def test_another_torch_is_refused(version, mesh, monkeypatch):
    model, _ = two_part_model()
    shard_module(model, mesh, reshard_after_forward=True, mp_policy=PARAMS_BF16)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(CapabilityError, match=rf"(?s)torch {version[:4]}.*2\.13"):
        bind(model)


FIELDS = {
    "codes": torch.zeros(4, 32, dtype=torch.uint8),
    "scale": torch.ones(1),
    "experts": torch.zeros(2, 3, 5, dtype=torch.bfloat16),
}


def metadata(world_size=2, fields=FIELDS):
    return GatherMetadata(schema_of(fields), (8, 32), world_size, 3)


def gathered(world_size=2):
    return tuple(torch.cat([t] * world_size) for t in FIELDS.values())


def test_what_fits_is_handed_back_by_name():
    found = check_outputs(gathered(), metadata(), "w")
    assert list(found) == list(FIELDS)
    assert [tuple(t.shape) for t in found.values()] == [(8, 32), (2,), (4, 3, 5)]


def test_metadata_is_plain_data():
    again = json.loads(json.dumps(asdict(metadata())))
    assert again["sent"][0] == {"field": "codes", "shape": [4, 32], "dtype": "uint8"}
    assert (again["logical_shape"], again["world_size"], again["version"]) == ([8, 32], 2, 3)


def test_number_order_shape_and_dtype_are_checked():
    codes, scale, experts = gathered()
    wrong = {
        r"gathered 2 physical tensors, 3 were sent": (codes, scale),
        r"gathered 4 physical": (codes, scale, experts, scale),
        r"gathered codes is float32 \(2,\), wanted uint8 \(8, 32\)": (scale, codes, experts),
        r"gathered scale is float32 \(1,\), wanted float32 \(2,\)": (codes, scale[:1], experts),
        r"gathered codes is uint8 \(8, 31\)": (codes[:, :31], scale, experts),
        r"gathered experts is float32": (codes, scale, experts.float()),
    }
    for words, outputs in wrong.items():
        with pytest.raises(GatherError, match=rf"(?s){words}.*where: block\.w"):
            check_outputs(outputs, metadata(), "block.w")


CONTEXT = FSDPGatherContext(phase="backward", reshard_after_forward=True, param_fqn="block.w")


def shards(recipe_id, master, kind, ranks=2, amax=None):
    """Each rank's rows (or experts) as a quantised shard."""
    spec = WeightSpec("block.w", kind, policy(recipe_id).recipe)
    parts = [MasterWeight(part.clone(), spec) for part in master.chunk(ranks)]
    for part in parts:
        part.refresh()
        if amax is not None:
            part.state.physical = spec.recipe.weight_class.quantize_master(part.master, spec, amax)
    return parts


def gather(parts, logical_shape):
    """What an all-gather over these ranks returns to rank 0, and its metadata."""
    sent = [part.pre_all_gather(CONTEXT, torch.Size(logical_shape), len(parts)) for part in parts]
    return tuple(torch.cat(column) for column in zip(*(tensors for tensors, _ in sent))), sent[0][1]


@pytest.mark.parametrize(("shape", "kind"), [((128, 80), "dense"), ((4, 96, 80), "grouped")])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_two_shards_gather_to_the_whole_weight(recipe_id, shape, kind):
    """Blocks and experts lie inside a rank, and HiF8's dense scale is that of the whole."""
    torch.manual_seed(1)
    master = torch.randn(shape)
    amax = master.abs().amax() if recipe_id == HIF8 and kind == "dense" else None
    parts = shards(recipe_id, master, kind, amax=amax)
    outputs, meta = gather(parts, shape)
    found = parts[0].post_all_gather(outputs, meta)
    assert type(found) is {FLOOR: MXFP8Tensor, HIF8: HiF8Tensor}[recipe_id]
    assert (found.shape, found.dtype, found.version) == (torch.Size(shape), torch.bfloat16, 1)
    whole = shards(recipe_id, master, kind, ranks=1)[0]
    for side in ("row", "col"):
        assert torch.equal(decode(found.select(side)), decode(whole.select(side)))
        assert torch.equal(found.select(side).scale, whole.select(side).scale)


def test_a_second_gather_swaps_what_the_first_returned():
    """Autograd has saved the first one; it must see the new physical tensors and their version."""
    master = torch.randn(64, 64)
    parts = shards(FLOOR, master, "dense")
    out = parts[0].post_all_gather(*gather(parts, (64, 64)))
    alias = out.detach()
    for part in parts:
        with torch.no_grad():
            part.mul_(2)
        part.refresh()
    assert parts[0].post_all_gather(*gather(parts, (64, 64)), out=out) is out
    assert alias.version == 2
    assert torch.equal(
        decode(alias.select("row")), decode(shards(FLOOR, master * 2, "dense", 1)[0].select("row"))
    )


def test_what_a_later_gather_leaves_out_is_gone():
    """After a backward had both directions, the next forward holds its own alone: the other would be an old one."""
    ahead = FSDPGatherContext(phase="forward", reshard_after_forward=True, param_fqn="block.w")
    (part,) = shards(FLOOR, torch.randn(64, 64), "dense", ranks=1)
    out = part.post_all_gather(*part.pre_all_gather(CONTEXT, torch.Size((64, 64)), 1))
    assert set(out.physical) == {"row_data", "row_scale", "col_data", "col_scale"}
    part.post_all_gather(*part.pre_all_gather(ahead, torch.Size((64, 64)), 1), out=out)
    assert set(out.physical) == {"row_data", "row_scale"}


class Group:
    """As much of torch's FSDPParamGroup and FSDPParam as a binding knows."""

    _reshard_after_forward = True

    def __init__(self):
        self.all_gather_outputs = ["buffer"]


def test_torchs_buffers_are_freed_when_the_fields_change():
    """Their number and sizes are frozen at the first gather otherwise."""
    param, group = Group(), Group()
    binding = FSDPBinding(param, group, "block.w")
    binding.announce_fields(("row",))
    assert param.all_gather_outputs == []
    param.all_gather_outputs.append("row buffer")
    binding.announce_fields(("row",))
    assert param.all_gather_outputs == ["row buffer"]
    binding.announce_fields(("row", "col"))
    assert param.all_gather_outputs == []


def test_a_binding_names_the_phase_and_outlives_nothing():
    phases = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            phases.append(binding.context())
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            phases.append(binding.context())
            return g

    param, group = Group(), Group()
    binding = FSDPBinding(param, group, "block.w")
    Probe.apply(torch.ones(1, requires_grad=True)).backward()
    assert phases == [FSDPGatherContext(phase, True, "block.w") for phase in ("forward", "backward")]
    del group
    with pytest.raises(StaleWeightError, match=r"block\.w: its FSDP group is gone"):
        binding.context()


def test_ranks_with_different_scales_of_one_dense_weight_are_refused():
    parts = shards(HIF8, torch.randn(64, 64) * torch.linspace(1, 9, 64).unsqueeze(1), "dense")
    outputs, meta = gather(parts, (64, 64))
    with pytest.raises(GatherError, match=r"(?s)ranks hold different scales.*block\.w"):
        parts[0].post_all_gather(outputs, meta)


def test_a_shard_refuses_what_it_did_not_send():
    parts = shards(FLOOR, torch.randn(64, 64), "dense")
    outputs, meta = gather(parts, (64, 64))
    with pytest.raises(GatherError, match=r"(?s)gathered 3 physical tensors, 4 were sent.*block\.w"):
        parts[0].post_all_gather(outputs[:3], meta)
    with pytest.raises(GatherError, match=r"(?s)gathered row_data.*block\.w"):
        parts[0].post_all_gather((outputs[1], outputs[0], *outputs[2:]), meta)


@pytest.mark.parametrize("recipe_id", FORMATS)
@pytest.mark.parametrize("kind", ["dense", "grouped"])
def test_every_physical_tensor_is_shardable_on_dimension_zero(recipe_id, kind):
    """torch gathers [-1, *shape[1:]]: two ranks of n rows make 2n, of every field."""
    shape = (64, 64) if kind == "dense" else (4, 64, 64)
    parts = shards(recipe_id, torch.randn(shape), kind)
    (ours, meta), (whole, _) = (
        p.pre_all_gather(CONTEXT, torch.Size(shape), 2)
        for p in (parts[0], shards(recipe_id, torch.randn(shape), kind, 1)[0])
    )
    for sent, alone, schema in zip(ours, whole, meta.sent):
        assert sent.is_contiguous()
        if schema.field != "scale" or kind == "grouped":
            assert 2 * sent.shape[0] == alone.shape[0]
            assert sent.shape[1:] == alone.shape[1:]


def both(fields):
    """Two ranks' parts of the same fields, the second rank's with other values; and what a gather makes of them."""
    first = tuple(fields.values())
    second = tuple(t.flip(0) + 1 for t in first)
    return first, second, tuple(torch.cat(pair) for pair in zip(first, second))


ALIKE = {
    "row_data": torch.arange(128, dtype=torch.uint8).view(4, 32),
    "row_scale": torch.arange(4, dtype=torch.uint8).view(4, 1),
    "col_data": torch.arange(1, 129, dtype=torch.uint8).view(4, 32),
    "scale": torch.tensor([0.5]),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_fields_that_are_alike_are_told_apart_by_this_ranks_own_part(rank):
    first, second, outputs = both(ALIKE)
    sent, meta = (first, second)[rank], metadata(fields=ALIKE)
    assert check_own_part(outputs, sent, meta, rank, "block.w") is True
    swapped = (outputs[2], outputs[1], outputs[0], outputs[3])
    assert list(check_outputs(swapped, meta, "block.w")) == list(ALIKE)  # shapes and dtypes tell nothing
    said = rf"(?s)rank {rank}'s own part of the gathered row_data is its col_data.*block\.w"
    with pytest.raises(GatherError, match=said):
        check_own_part(swapped, sent, meta, rank, "block.w")


def test_ranks_in_another_order_and_a_value_that_was_changed_are_seen():
    first, second, outputs = both(ALIKE)
    meta = metadata(fields=ALIKE)
    turned = tuple(torch.cat([b, a]) for a, b in zip(first, second))
    with pytest.raises(
        GatherError, match=r"(?s)own part of the gathered row_data is not what it sent.*block\.w"
    ):
        check_own_part(turned, first, meta, 0, "block.w")
    for index, name in enumerate(ALIKE):
        changed = [t.clone() for t in outputs]
        changed[index].view(torch.uint8).view(-1)[0] ^= 1
        with pytest.raises(GatherError, match=rf"(?s)own part of the gathered {name} is not"):
            check_own_part(tuple(changed), first, meta, 0, "block.w")
        check_own_part(
            tuple(changed), second, meta, 1, "block.w"
        )  # another rank's part is that rank's to hold


def test_fields_that_hold_the_same_values_settle_nothing():
    same = {
        "row_data": torch.zeros(4, 32),
        "col_data": torch.zeros(4, 32),
        "nan": torch.full((2,), torch.nan),
    }
    sent = tuple(same.values())
    outputs = tuple(torch.cat([t, t]) for t in sent)
    assert check_own_part(outputs, sent, metadata(fields=same), 0, "w") is False
    other = {**same, "col_data": torch.full((4, 32), -0.0)}
    sent = tuple(other.values())
    assert (
        check_own_part(tuple(torch.cat([t, t]) for t in sent), sent, metadata(fields=other), 0, "w") is True
    )


class TwoRanks:
    """As much of a mesh as a gather's hooks ask for."""

    def size(self):
        return 2

    def get_local_rank(self):
        return 1


def through_hooks(parts, swap=False):
    """One gather as torch makes it, seen on the last of two ranks."""
    mesh, shape = TwoRanks(), torch.Size((64, 64))
    sent = [part.fsdp_pre_all_gather(mesh, shape, (64, 1), nn.Linear(64, 64), PARAMS_BF16) for part in parts]
    outputs = [torch.cat(column) for column in zip(*(tensors for tensors, _ in sent))]
    if swap:
        outputs[0], outputs[2] = outputs[2], outputs[0]
    return parts[1].fsdp_post_all_gather(tuple(outputs), sent[1][1], torch.bfloat16)


def bound_shards(group):
    parts = shards(FLOOR, torch.randn(64, 64), "dense")
    for part in parts:
        part.fsdp_binding = FSDPBinding(group, group, "block.w")
    return parts


def test_codes_in_each_others_place_are_refused_at_the_first_gather():
    group = Group()
    group._reshard_after_forward = False  # a forward that gathers both directions
    parts = bound_shards(group)
    with pytest.raises(
        GatherError, match=r"(?s)rank 1's own part of the gathered row_data is its col_data.*block\.w"
    ):
        through_hooks(parts, swap=True)
    assert through_hooks(parts)[0].shape == (64, 64)


def test_each_set_of_fields_is_looked_at_once(monkeypatch):
    looked = []

    def noted(outputs, sent, meta, rank, fqn):
        looked.append((fqn, tuple(s.field for s in meta.sent)))
        return check_own_part(outputs, sent, meta, rank, fqn)

    monkeypatch.setattr("quaver.distributed.fsdp.check_own_part", noted)
    group = Group()
    parts = bound_shards(group)
    for reshard in (True, False, True, False, True):  # row alone, both directions, and so on
        group._reshard_after_forward = reshard
        through_hooks(parts)
    row = ("row_data", "row_scale")
    assert looked == [("block.w", row), ("block.w", (*row, "col_data", "col_scale"))]
