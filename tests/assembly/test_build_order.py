"""Each adjacent pair of build steps, swapped, is a start-up error; and a failed plan leaves the model untouched."""

import pytest
import torch

from quaver.assembly import Assembly, plan_on_meta
from quaver.distributed import init_world, shard_mesh
from quaver.errors import CapabilityError, ConfigError, PlanError

CPU = torch.device("cpu")


def first_unit(assembly: Assembly) -> str:
    return next(iter(assembly.units))


def test_plan_before_meta(micro) -> None:
    with pytest.raises(PlanError, match="'plan' out of order: 'meta' is next"):
        Assembly(micro("mxfp8")).compile_plan()


def test_install_before_plan(micro) -> None:
    assembly = Assembly(micro("mxfp8"))
    assembly.build_meta()
    with pytest.raises(PlanError, match="'install' out of order: 'plan' is next"):
        assembly.install()


def test_materialise_before_install(micro) -> None:
    assembly = Assembly(micro("mxfp8"))
    assembly.build_meta()
    assembly.compile_plan()
    with pytest.raises(PlanError, match="before the replacements are installed"):
        assembly.materialise("model.layers.0", CPU)


def test_quantise_before_materialise(micro) -> None:
    assembly = plan_on_meta(micro("mxfp8"))
    with pytest.raises(PlanError, match="'quantise' out of order: 'materialise' is next"):
        assembly.quantise(first_unit(assembly))


def test_shard_before_quantise(micro) -> None:
    init_world()
    assembly = plan_on_meta(micro("mxfp8"))
    assembly.materialise("model.embed_tokens", CPU)
    with pytest.raises(PlanError, match="'shard' out of order: 'quantise' is next"):
        assembly.shard("model.embed_tokens", shard_mesh(None))


def test_shard_root_before_every_unit(micro) -> None:
    init_world()
    assembly = plan_on_meta(micro("mxfp8"))
    with pytest.raises(PlanError, match="units are unfinished"):
        assembly.shard_root(shard_mesh(None))


def built_units(micro) -> Assembly:
    init_world()
    mesh = shard_mesh(None)
    assembly = plan_on_meta(micro("mxfp8"))
    for fqn in assembly.units:
        assembly.materialise(fqn, CPU)
        assembly.quantise(fqn)
        assembly.shard(fqn, mesh)
    return assembly


def test_activation_checkpoint_before_shard_root(micro) -> None:
    with pytest.raises(PlanError, match="'activation_checkpoint' out of order"):
        built_units(micro).checkpoint_activations()


def test_optimizer_before_activation_checkpoint(micro) -> None:
    assembly = built_units(micro)
    assembly.shard_root(shard_mesh(None))
    with pytest.raises(PlanError, match="'optimizer' out of order: 'activation_checkpoint' is next"):
        assembly.make_optimizer()


def test_a_step_taken_twice(micro) -> None:
    assembly = plan_on_meta(micro("mxfp8"))
    with pytest.raises(PlanError, match="'install' out of order"):
        assembly.install()


def test_forward_before_quantise(micro) -> None:
    assembly = plan_on_meta(micro("mxfp8"))
    layer = assembly.model.model.layers[0].self_attn.q_proj
    with pytest.raises(PlanError, match="forward before its weights were quantised"):
        layer(torch.zeros(1, 64, device="meta"))


def snapshot(model) -> list:
    return [
        [(n, id(m)) for n, m in model.named_modules(remove_duplicate=False)],
        [(n, id(p), p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)],
        [(n, id(b)) for n, b in model.named_buffers(remove_duplicate=False)],
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"match": "model.layers.*.self_attn.no_proj"}, "matches no module"),
        ({"match": "model.layers.*.self_attn.*_proj"}, "wildcard under self_attn"),
        ({"match": "**.*_proj"}, "projections of the whole model"),
        ({"match": "model.layers.*.mlp.gate"}, "another type|not the rule's type"),
    ],
)
def test_a_failed_plan_leaves_the_model_untouched(micro, rule, message) -> None:
    config = micro("mxfp8")
    rule = {"module_type": "torch.nn.Linear", "replace_module": "low_precision_linear", **rule}
    config = config.model_copy(
        update={"plan_overrides": (*config.plan_overrides, type(config.plan_overrides[0])(**rule))}
    )
    assembly = Assembly(config)
    assembly.build_meta()
    before = snapshot(assembly.model)
    with pytest.raises(PlanError, match=message):
        assembly.compile_plan()
    assert snapshot(assembly.model) == before


def test_two_factories_for_one_module(micro) -> None:
    config = micro("mxfp8")
    other = type(config.plan_overrides[0])(
        match="model.layers.0.mlp.gate_proj",
        module_type="torch.nn.Linear",
        replace_module="deepseek_v3_low_precision_experts",
    )
    assembly = Assembly(config.model_copy(update={"plan_overrides": (*config.plan_overrides, other)}))
    assembly.build_meta()
    with pytest.raises(PlanError, match=r"model\.layers\.0\.mlp\.gate_proj is claimed by two factories"):
        assembly.compile_plan()


def test_enabled_without_rules_is_an_error(micro) -> None:
    assembly = Assembly(micro("mxfp8").model_copy(update={"plan_overrides": ()}))
    assembly.build_meta()
    with pytest.raises(PlanError, match="no module is planned"):
        assembly.compile_plan()


def test_no_process_group_and_no_data_up_to_the_plan(micro, monkeypatch) -> None:
    import torch.distributed as dist

    import quaver.data

    def refuse(*_, **__):
        raise AssertionError("touched while planning")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(quaver.data, "prepare_data", refuse)
    state = torch.random.get_rng_state()
    assembly = plan_on_meta(micro("hif8"))
    assert all(p.is_meta for p in assembly.model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_backend_that_is_not_here_fails_before_the_model_is_built(micro, monkeypatch) -> None:
    import quaver.assembly.build as build

    monkeypatch.setattr(build, "build_on_meta", lambda *_: pytest.fail("the model was built"))
    for backend in ("npu", "cuda"):
        with pytest.raises(CapabilityError, match=backend) as raised:
            Assembly(micro("mxfp8", f"low_precision.backend={backend}"))
        assert "low_precision.backend" in str(raised.value)


def test_off_calls_no_factory_and_imports_no_backend(micro, monkeypatch) -> None:
    import quaver.assembly.build as build

    monkeypatch.setattr(build, "build_policy", lambda *_, **__: pytest.fail("a backend was asked for"))
    assembly = plan_on_meta(micro("bf16"))
    assert assembly.policy is None
    assert assembly.replacements() == []


def test_shard_size_that_does_not_divide(micro) -> None:
    init_world()
    with pytest.raises(ConfigError, match="dp_shard_size 2 does not divide the number of ranks 1"):
        shard_mesh(2)


def test_plan_without_a_model() -> None:
    from quaver.config import load_config

    with pytest.raises(ConfigError, match="no model"):
        Assembly(load_config({"name": "x"}))
