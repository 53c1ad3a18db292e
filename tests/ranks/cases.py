"""What each rank does in the tests of several ranks: a short training, and what it left, as plain data.

`train_case` trains as the trainer does. `reference_case` is one process that runs the micro-batches of all ranks and
sums gradients in rank order: what several ranks must equal bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from helpers.micro import FORMATS, MODEL, RULES

from quaver.assembly import Assembly, assemble
from quaver.config import load_config
from quaver.data import Loader, prepare_data
from quaver.distributed import (
    PARAMS_BF16,
    FSDPGatherContext,
    local_tensor,
    shard_mesh,
    shard_module,
)
from quaver.low_precision import MasterWeight
from quaver.training.step import accumulate, scheduled_lr, token_nats, trainable, update


def config_of(case: dict[str, Any]) -> Any:
    """The micro run of a case: format, recompute, accumulation, and any other overrides."""
    if "file" in case:  # a whole config instead of the micro one
        return load_config(case["file"], case["overrides"])
    model = {**MODEL, **case.get("model", {})}
    document = {
        "name": "ranks",
        "seed": 7,
        "model": {"config_name_or_path": "deepseek_v3", "config_overrides": model},
        "low_precision": FORMATS[case["format"]],
        "plan_overrides": RULES,
        "fsdp_config": {"reshard_after_forward": case.get("reshard", True)},
        "gradient_checkpointing": {"activation_checkpoint": case.get("recompute", "off")},
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "data": {
            "sources": [{"path": case["corpus"]}],
            "seq_len": 32,
            "cache_dir": case["cache"],
            "validation_fraction": 0.1,
        },
        "training": {"steps": 10, "micro_batch_size": case.get("batch", 2)},
        # clipping is active: gradient norms of these runs are between 2 and 5
        "optimizer": {"lr": 3e-3, "clip_norm": 0.5, "schedule": {"kind": "cosine", "warmup_steps": 2}},
    }
    return load_config(document, case.get("overrides", []))


def whole_masters(assembly: Assembly) -> dict[str, torch.Tensor]:
    """Each whole FP32 master; sharded ones are gathered."""
    found = {}
    for name, parameter in assembly.model.named_parameters():
        local = local_tensor(parameter.detach())
        plain = (local.master if isinstance(local, MasterWeight) else local).contiguous()
        found[name] = whole(parameter, plain)
    return found


def whole(parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """All rows of a parameter from every shard, in order; uneven shards are gathered by their own sizes."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.size(mesh.ndim - 1) == 1:
        return plain
    group = mesh.get_group(mesh.ndim - 1)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, plain, group=group)
    return torch.cat(parts)


def outcome(assembly: Assembly, losses: list[float], norms: list[float], save: str | None) -> dict[str, Any]:
    """Losses and norms as exact text, masters as digests (and in a file), GEMM counts, and what ranks agree on."""
    masters = whole_masters(assembly)
    digests = {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in masters.items()}
    if save is not None and dist.get_rank() == 0:
        torch.save(masters, save)
    replicas: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, digests)
    kept = [assembly.model.state_dict()[fqn] for fqn in assembly.replicated]
    return {
        "losses": [loss.hex() for loss in losses],
        "norms": [norm.hex() for norm in norms],
        "masters": digests,
        "gemms": sum(assembly.ledger.executed.values()),
        "ledger_ok": assembly.policy is None or not assembly.ledger.differences(assembly.sites()),
        "replicated": sorted(assembly.replicated),
        "replicas_equal": all(other == digests for other in replicas),
        "plain_keys": all(type(t) is torch.Tensor and t.dtype is torch.float32 for t in kept),
    }


def train_case(case: dict[str, Any]) -> dict[str, Any]:
    """A few steps on this rank's micro-batches."""
    config = config_of(case)
    assembly = assemble(config, shard_mesh(config.fsdp_config.dp_shard_size), torch.device("cpu"))
    data = prepare_data(config.data, seed=config.seed)
    loader = Loader(
        data.train,
        seq_len=config.data.seq_len,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    losses, norms = [], []
    for step in range(case.get("steps", 3)):
        batches = [loader.next() for _ in range(config.gradient_accumulation_steps)]
        loss, tokens = accumulate(assembly, batches)
        lr = scheduled_lr(step, config.training.steps, config.optimizer)
        result = update(assembly, loss, tokens, lr=lr, clip_norm=config.optimizer.clip_norm)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return outcome(assembly, losses, norms, case.get("save"))


def reference_case(case: dict[str, Any]) -> dict[str, Any]:
    """One process: the micro-batches of `case["ranks"]` ranks, gradients summed in rank order."""
    config = config_of({**case, "accumulation": 1})
    ranks, micro_steps = case["ranks"], case.get("accumulation", 1)
    assembly = assemble(config, shard_mesh(None), torch.device("cpu"))
    data = prepare_data(config.data, seed=config.seed)
    loader = Loader(
        data.train,
        seq_len=config.data.seq_len,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
    )
    losses, norms = [], []
    for step in range(case.get("steps", 3)):
        batches = [[loader.next() for _ in range(ranks)] for _ in range(micro_steps)]
        tokens = sum(batch.labels.numel() for row in batches for batch in row)
        total, grads = 0.0, [[] for _ in range(micro_steps)]
        for index, row in enumerate(batches):
            for batch in row:
                loss = token_nats(assembly.model, batch) / tokens
                loss.backward()
                total += loss.detach().double().item()
                grads[index].append(
                    {n: p.grad for n, p in assembly.model.named_parameters() if p.grad is not None}
                )
                assembly.model.zero_grad(set_to_none=True)
        for name, parameter in assembly.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = in_order([[g[name] for g in row] for row in grads], case.get("late", False))
        lr = scheduled_lr(step, config.training.steps, config.optimizer)
        result = update(assembly, total, tokens, lr=lr, clip_norm=config.optimizer.clip_norm)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    assert list(trainable(assembly.model))
    return outcome(assembly, losses, norms, case.get("save"))


def in_order(grads: list[list[torch.Tensor]], late: bool) -> torch.Tensor:
    """Sum over ranks in each micro-step, then over micro-steps; or over micro-steps on each rank first."""
    rows = grads if not late else [list(column) for column in zip(*grads)]
    total = None
    for row in rows:
        part = row[0]
        for grad in row[1:]:
            part = part + grad
        total = part if total is None else total + part
    assert total is not None
    return total


def key(case: dict[str, Any]) -> str:
    """A readable id of a case."""
    return json.dumps({k: v for k, v in case.items() if k not in ("corpus", "cache")}, sort_keys=True)


def linears(case: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One quantised linear layer of 2 * rows rows twice: over two ranks, and whole; each with its optimiser."""
    import quaver

    low = quaver.LowPrecisionConfig(**FORMATS[case["format"]])
    torch.manual_seed(3)
    nets = [
        torch.nn.Sequential(torch.nn.Linear(case["columns"], 2 * case["rows"], bias=False)) for _ in range(2)
    ]
    with torch.no_grad():  # columns of very different size, so that shared scales matter
        nets[0][0].weight.mul_(torch.logspace(-6, 3, case["columns"], base=2.0))
        nets[0][0].weight[: case["rows"]].mul_(0.01)
    nets[1].load_state_dict(nets[0].state_dict())
    rule = quaver.ReplacementRule("0", torch.nn.Linear, "low_precision_linear")
    for net in nets:
        quaver.quantize_modules(net, low, plan=[rule])
    shard_module(nets[0], shard_mesh(None), reshard_after_forward=False, mp_policy=PARAMS_BF16)
    for net in nets:
        # a rate that moves weights into other blocks' exponents, so that the codes after it are others
        net.optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)
        quaver.attach(net.optimizer, net)
    return nets[0], nets[1]


def gathered_case(case: dict[str, Any]) -> dict[str, Any]:
    """A layer over two ranks against the whole one: what is gathered, all three products, a step and its refresh.

    Each rank has rows of its own; the whole layer takes those of both, and sums their gradients in rank order.
    """
    from quaver.low_precision import quantised_weights

    model, whole_model = linears(case)

    def rows_of(rank: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(1 + rank)
        return torch.randn(64, case["columns"], generator=numbers).bfloat16().requires_grad_()

    def held_equal() -> bool:
        held, wanted = model[0].weight.physical, whole_model[0].weight.physical
        return held.keys() == wanted.keys() and all(torch.equal(held[k], wanted[k]) for k in wanted)

    codes = {k: t.clone() for k, t in whole_model[0].weight.physical.items()}
    x, rank = rows_of(dist.get_rank()), dist.get_rank()
    y = model(x)
    equal = held_equal()
    y.float().square().sum().backward()
    sums, outputs_equal = [], False
    for other in range(2):
        x_whole = rows_of(other)
        y_whole = whole_model(x_whole)
        y_whole.float().square().sum().backward()
        sums.append(whole_model[0].weight.grad)
        whole_model[0].weight.grad = None
        if other == rank:
            outputs_equal = torch.equal(y, y_whole) and torch.equal(x.grad, x_whole.grad)
    whole_model[0].weight.grad = sums[0] + sums[1]
    gradient = whole(model[0].weight, local_tensor(model[0].weight.grad))
    wgrad_equal = torch.equal(gradient, whole_model[0].weight.grad) and bool(gradient.count_nonzero())
    for net in (model, whole_model):
        net.optimizer.step()
        net.optimizer.zero_grad()
    master = whole(model[0].weight, local_tensor(model[0].weight.detach()).master)
    master_equal = torch.equal(master, whole_model[0].weight.master)
    model.unshard()
    equal_after = held_equal()
    model.reshard()
    ((_, local),) = quantised_weights(model).values()
    context = FSDPGatherContext("backward", True, "a")
    sent = {s.field for s in local.pre_all_gather(context, whole_model[0].weight.shape, 2)[1].sent}
    answers = {
        "equal": equal,
        "outputs_equal": outputs_equal,
        "wgrad_equal": wgrad_equal,
        "master_equal": master_equal,
        "equal_after_step": equal_after,
        "codes_moved": all(not torch.equal(codes[k], t) for k, t in whole_model[0].weight.physical.items()),
        "cut": "col_data" in sent and "col_scale" not in sent,
    }
    both: list[Any] = [None, None]
    dist.all_gather_object(both, answers)
    return {key: both[0][key] and both[1][key] for key in answers}


def train_or_refuse(case: dict[str, Any]) -> dict[str, Any]:
    """As `train_case`, or the error that refused the shards."""
    from quaver.errors import QuaverError

    try:
        return train_case(case)
    except QuaverError as error:
        return {"error": str(error)}
