"""Whole steps against an oracle written by hand: plain FP32 copies, transformers' own modules, torch's own autograd.

The oracle knows no FSDP, no trainer and no config of ours: every number of the schedule, the groups and the
clipping is written out here once more. What it has in common with a run is the batches, the first masters, and
torch's AdamW kernel. All of it is compared bit for bit.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_equalities import build, masters

from quaver.data import Loader, prepare_data, validation_batches
from quaver.distributed import local_tensor
from quaver.training import Silent, Trainer

STEPS, MICRO_STEPS, BATCH = 4, 2, 2
LR, BETAS, EPS, DECAY, CLIP, BIAS_RATE = 4e-3, (0.8, 0.9), 1e-6, 0.3, 0.5, 0.01
# half of the four steps warm up: W = 2, rates 1/3 and 2/3; then from the full one linearly to 0.2 of it at step 4
RATES = [LR * (1 / 3), LR * (2 / 3), LR, LR * (1 - 0.8 * (1 / 2))]
OVERRIDES = (
    f"training.steps={STEPS}",
    f"gradient_accumulation_steps={MICRO_STEPS}",
    f"training.router_bias_update_rate={BIAS_RATE}",
    "training.validate_every=2",
    f"optimizer={{lr: {LR}, betas: [0.8, 0.9], eps: {EPS}, weight_decay: {DECAY}, clip_norm: {CLIP}, "
    "schedule: {kind: linear, warmup_ratio: 0.5, final_ratio: 0.2}}",
)
GATES = ("model.layers.1.mlp.gate", "model.layers.2.mlp.gate")


class Oracle:
    """The micro model in BF16 over FP32 masters, its AdamW and its router bias, by hand."""

    def __init__(self, hf_config, first: dict[str, torch.Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.float32
        )
        self.masters = {name: value.clone().requires_grad_() for name, value in first.items()}
        assert self.masters.keys() == dict(self.model.named_parameters()).keys()
        self.counts = {gate: torch.zeros(4, dtype=torch.int64) for gate in GATES}
        for gate in GATES:
            self.model.get_submodule(gate).register_forward_hook(self._count(gate))
        decay = [m for m in self.masters.values() if m.dim() >= 2]
        rest = [m for m in self.masters.values() if m.dim() < 2]
        groups = [{"params": decay, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)

    def _count(self, gate: str):
        def hook(_module, _inputs, output) -> None:
            if torch.is_grad_enabled():
                self.counts[gate] += torch.bincount(output[-1].flatten(), minlength=4)

        return hook

    def bias(self, gate: str) -> torch.Tensor:
        return self.model.get_buffer(f"{gate}.e_score_correction_bias")

    def nats(self, batch) -> torch.Tensor:
        """Routers compute in FP32, all else in BF16."""
        weights = {n: m if n.endswith("mlp.gate.weight") else m.bfloat16() for n, m in self.masters.items()}
        call = torch.func.functional_call(
            self.model, weights, (), {"input_ids": batch.input_ids, "use_cache": False}
        )
        logits = call.logits.float().view(-1, call.logits.shape[-1])
        return torch.nn.functional.cross_entropy(logits, batch.labels.view(-1), reduction="sum")

    def step(self, micro_batches: list, lr: float) -> tuple[float, float]:
        """Mean loss and gradient norm of one step, which is also taken."""
        tokens = sum(batch.labels.numel() for batch in micro_batches)
        loss, grads = 0.0, {name: torch.zeros_like(m) for name, m in self.masters.items()}
        for batch in micro_batches:
            part = self.nats(batch) / tokens
            loss += float(part.detach().double())
            for name, grad in zip(grads, torch.autograd.grad(part, list(self.masters.values()))):
                grads[name] += grad
        norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads.values()))
        assert norm > CLIP, "the clipping of this test is not active"
        for name, master in self.masters.items():
            master.grad = grads[name] * torch.tensor(CLIP / (norm + 1e-6), dtype=torch.float32)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for gate in GATES:
            counts = self.counts[gate].tolist()
            assert sum(counts) == 2 * tokens
            for expert, count in enumerate(counts):
                if count != sum(counts) / 4:
                    self.bias(gate)[expert] += BIAS_RATE if count < sum(counts) / 4 else -BIAS_RATE
            self.counts[gate].zero_()
        return loss, norm

    @torch.no_grad()
    def validate(self, windows: list) -> tuple[float, float]:
        nats = 0.0
        for batch in windows:
            nats += float(self.nats(batch).double())
        tokens = sum(batch.labels.numel() for batch in windows)
        return nats / tokens, nats / math.log(2) / sum(batch.n_bytes for batch in windows)


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_a_run_equals_steps_by_hand(micro, tmp_path, read_metrics, recompute: str) -> None:
    config = micro("bf16", *OVERRIDES, f"gradient_checkpointing.activation_checkpoint={recompute}")
    start = build(config)
    oracle = Oracle(start.hf_config, masters(start.model))
    start.router_bias.close()
    data = prepare_data(config.data, seed=7)
    loader = Loader(data.train, seq_len=32, micro_batch_size=BATCH, seed=7)
    windows = list(validation_batches(data.validation, seq_len=32, batch_size=BATCH, count=2))
    wanted = []
    for step, rate in enumerate(RATES):
        if step % 2 == 0:
            val_loss, val_bpb = oracle.validate(windows)
            wanted.append({"step": step, "val_loss": val_loss, "val_bpb": val_bpb})
        loss, norm = oracle.step([loader.next() for _ in range(MICRO_STEPS)], rate)
        tokens = (step + 1) * MICRO_STEPS * BATCH * 32
        line = {"step": step + 1, "loss": loss, "grad_norm": pytest.approx(norm, rel=1e-12), "lr": rate}
        wanted.append(line | {"tokens": tokens, "skipped": 0})
    val_loss, val_bpb = oracle.validate(windows)
    wanted.append({"step": STEPS, "val_loss": val_loss, "val_bpb": val_bpb})

    trainer = Trainer(config, Silent())
    result = trainer.run(tmp_path / "run")
    lines = read_metrics(result.dir)
    assert all(line.pop("tokens_per_s") > 0 for line in lines if "loss" in line)
    assert lines == wanted
    assert result.val_loss == val_loss
    model, adamw = trainer.assembly.model, trainer.assembly.optimizer
    ended = masters(model)
    assert [n for n, m in oracle.masters.items() if not torch.equal(m.detach(), ended[n])] == []
    for name, parameter in model.named_parameters():
        moments, by_hand = adamw.state[parameter], oracle.adamw.state[oracle.masters[name]]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(local_tensor(moments[key]), by_hand[key]), (name, key)
    for gate in GATES:
        assert oracle.bias(gate).any()
        assert torch.equal(model.get_buffer(f"{gate}.e_score_correction_bias"), oracle.bias(gate))
