"""A whole micro DeepSeek-V3 in every recipe: codes are never saved, always right, and runs change recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from small_runs import differing, next_numbers, scatter_generators, tensors

from quaver.assembly import Assembly, assemble
from quaver.checkpoint import CheckpointManager, TrainState, load
from quaver.data import Loader, prepare_data
from quaver.distributed import init_world, shard_mesh
from quaver.errors import CheckpointError, ConfigError
from quaver.low_precision import quantised_weights, refresh
from quaver.models import from_hf_config
from quaver.training.step import train_step


class Run:
    """One rank of a run, without the trainer."""

    def __init__(self, config) -> None:
        torch.use_deterministic_algorithms(True)
        init_world()
        self.config = config
        self.assembly: Assembly = assemble(config, shard_mesh(None), torch.device("cpu"))
        data = prepare_data(config.data, seed=config.seed)
        self.loader = Loader(data.train, seq_len=config.data.seq_len, micro_batch_size=2, seed=config.seed)
        low = config.low_precision
        self.state = TrainState(
            model=self.assembly.model,
            optimizer=self.assembly.optimizer,
            progress={"updates": 3},
            recipe=low.recipe_id if low.enabled else None,
            config_digest="config",
            tokenizer_digest=data.tokenizer.digest,
            loader=self.loader,
            router_bias=self.assembly.router_bias,
        )

    def steps(self, count: int, accumulation: int = 2) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        results = []
        for _ in range(count):
            batches = [self.loader.next() for _ in range(accumulation)]
            result = train_step(self.assembly, batches, lr=3e-3, clip_norm=1.0)
            results.append((result.loss, result.grad_norm))
        return results

    def spoiled(self) -> Run:
        """Every master is wrong, and every code stale."""
        with torch.no_grad():
            for parameter in self.assembly.model.parameters():
                parameter.add_(1.0)
        return self

    def codes(self) -> dict[str, torch.Tensor]:
        """Every physical tensor of every quantised weight; StaleWeightError if one is behind its master."""
        weights = quantised_weights(self.assembly.model)
        return {
            f"{fqn}:{field}": tensor.clone()
            for fqn, (_, weight) in weights.items()
            for field, tensor in weight.physical.items()
        }


@pytest.fixture
def saved(micro, tmp_path: Path):
    """saved(fmt, overrides) -> a run after three steps and its checkpoint."""

    def make(fmt: str, *overrides: str) -> tuple[Run, Path]:
        run = Run(micro(fmt, *overrides))
        run.steps(3)
        with CheckpointManager(tmp_path / fmt) as manager:
            return run, manager.save(3, run.state)

    return make


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "hif8"])
def test_a_run_goes_on_to_the_bit_and_nothing_derived_is_saved(
    micro, saved, tmp_path: Path, fmt: str
) -> None:
    run, path = saved(fmt)
    scatter_generators(3)
    with CheckpointManager(tmp_path / "again") as manager:
        path = manager.save(3, run.state)
    wanted, codes, numbers = tensors(run.state), run.codes(), next_numbers()
    assert (fmt == "bf16") == (not codes)
    resumed = Run(micro(fmt)).spoiled()
    assert differing(tensors(resumed.state), wanted) != []
    loaded = load(path, resumed.state)
    assert (loaded.recipe, loaded.progress, loaded.rng) == (run.state.recipe, {"updates": 3}, True)
    assert next_numbers() == numbers
    assert differing(tensors(resumed.state), wanted) == []
    assert differing(resumed.codes(), codes) == []
    assert resumed.loader.cursor == run.loader.cursor == 12
    biases = [v for k, v in wanted.items() if k.endswith("e_score_correction_bias")]
    assert len(biases) == 2
    assert all(b.dtype is torch.float32 and b.any() for b in biases)
    assert resumed.steps(2) == run.steps(2)
    assert differing(tensors(resumed.state), tensors(run.state)) == []


def test_keys_are_those_of_hugging_face_whatever_the_recipe_and_recompute(saved) -> None:
    """Held against a model that transformers builds, and read with torch's own reader."""
    keys, run = {}, None
    for fmt, recompute in (("bf16", "off"), ("mxfp8", "off"), ("mxfp8", "full"), ("hif8", "full")):
        run, path = saved(fmt, f"gradient_checkpointing.activation_checkpoint={recompute}")
        metadata = torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        keys[fmt, recompute] = {k: (tuple(m.size), m.properties.dtype) for k, m in metadata.items()}
    first = keys.pop(("bf16", "off"))
    assert all(other == first for other in keys.values())
    spec = run.config.model
    plain = from_hf_config(spec.config_name_or_path, config_overrides=spec.config_overrides)
    shapes = {k: tuple(p.shape) for k, p in plain.named_parameters()}
    wanted = {f"model.{k}": (shape, torch.bfloat16) for k, shape in shapes.items()}
    for layer in (1, 2):
        wanted[f"model.model.layers.{layer}.mlp.gate.e_score_correction_bias"] = ((4,), torch.float32)
    for k, shape in shapes.items():
        wanted |= {
            f"optim.{k}.{what}": (shape, torch.float32) for what in ("master", "exp_avg", "exp_avg_sq")
        }
        wanted[f"optim.{k}.step"] = ((), torch.float32)
    assert first == wanted


@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "mxfp8"), ("bf16", "hif8"), ("mxfp8", "hif8"), ("hif8", "bf16")]
)
def test_a_run_changes_its_recipe_half_way(micro, saved, source: str, target: str) -> None:
    run, path = saved(source)
    wanted = tensors(run.state)
    other = Run(micro(target))
    loaded = load(path, other.state, rng=False, loader=False)
    assert loaded.recipe == run.state.recipe != other.state.recipe
    assert differing(tensors(other.state), wanted) == []
    anew = Run(micro(target)).spoiled()
    masters = dict(run.assembly.model.named_parameters())
    with torch.no_grad():
        for fqn, parameter in anew.assembly.model.named_parameters():
            parameter.copy_(masters[fqn])
    if target != "bf16":
        refresh(anew.assembly.model)
    assert differing(other.codes(), anew.codes()) == []
    assert other.loader.cursor == 0
    other.loader.load_state_dict(run.loader.state_dict())
    ((loss, _),), ((before, _),) = other.steps(1), run.steps(1)
    assert loss == pytest.approx(before, rel=1e-2)
    assert loss != before


def test_other_data_is_refused_before_anything_is_loaded(micro, saved) -> None:
    _, path = saved("bf16")
    other = Run(micro("bf16", "seed=8"))
    before = tensors(other.state)
    with pytest.raises(ConfigError, match="not that of the saved run"):
        load(path, other.state)
    assert differing(tensors(other.state), before) == []


def test_other_routers_are_refused(micro, saved) -> None:
    _, path = saved("bf16")
    other = Run(micro("bf16", "model.freeze=[model.layers.1.mlp.gate]"))
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.1\.mlp\.gate\.weight\.exp_avg is not this run's"
    ) as caught:
        load(path, other.state)
    assert caught.value.exit_code == 2
