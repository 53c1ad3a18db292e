"""What each rank does in the tests of the sharded build: full widths, prefetch, and the memory that building takes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from cases import config_of, outcome, train_case
from helpers.micro import FORMATS
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quaver
from quaver.assembly import Assembly, plan_on_meta
from quaver.backends import Ledger
from quaver.distributed import local_tensor, shard_mesh
from quaver.distributed.fsdp import fsdp_modules
from quaver.errors import PlanError
from quaver.low_precision import MasterWeight
from quaver.training.proof import sum_expert_tokens


def prefetch_case(case: dict[str, Any]) -> dict[str, Any]:
    """A training in which gathers are prefetched as the case says; and how often a gather ran ahead of its layer."""
    ahead = []
    original = FSDPParamGroup._prefetch_unshard

    def counted(group: FSDPParamGroup, name: str) -> None:
        ahead.append(name)
        if case["prefetch"] != "off":
            original(group, name)

    import cases

    assemble = cases.assemble

    def arranged(*arguments: Any) -> Assembly:
        assembly = assemble(*arguments)
        layers = list(assembly.model.model.layers)
        if case["prefetch"] == "explicit":
            for index, layer in enumerate(layers):
                layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
                if index:
                    layer.set_modules_to_backward_prefetch(layers[max(0, index - 2) : index][::-1])
        return assembly

    FSDPParamGroup._prefetch_unshard = staticmethod(counted)
    cases.assemble = arranged
    try:
        return {**train_case(case), "ahead": len(ahead)}
    finally:
        FSDPParamGroup._prefetch_unshard = staticmethod(original)
        cases.assemble = assemble


def plain_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors with storage of their own that a shard or a master is made of."""
    if isinstance(leaf, torch.Tensor):
        leaf = local_tensor(leaf)
    if isinstance(leaf, MasterWeight):
        return [leaf.master, *(leaf.state.physical or {}).values()]
    return [leaf] if isinstance(leaf, torch.Tensor) else []


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operator makes while it is alive; `peak` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (plain for leaf in tree_leaves(result) for plain in plain_tensors(leaf)):
            if tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen and size:
                self._seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, size)
        return result


def build_memory_case(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the build on this rank: the peak, the shards that remain, and those of the largest unit."""
    config = config_of(case)
    mesh = shard_mesh(None)
    assembly = plan_on_meta(config)
    assembly.verdicts(mesh.size())
    units = [sum(p.numel() for p in unit.parameters()) for unit in assembly.units.values()]
    torch.manual_seed(config.seed)
    gc.collect()
    with LiveBytes() as live:
        for fqn in assembly.units:
            assembly.materialise(fqn, torch.device("cpu"))
            assembly.quantise(fqn)
            assembly.shard(fqn, mesh)
        assembly.shard_root(mesh)
    shards = 0
    for parameter in assembly.model.parameters():
        local = local_tensor(parameter)
        plain = local.master if isinstance(local, MasterWeight) else local
        shards += plain.numel() * 4
    return {"peak": live.peak, "shards": shards, "largest": max(units), "all": sum(units)}


def integer_reshard_case(case: dict[str, Any]) -> str:
    """What a user's own fully_shard with reshard_after_forward=2 on four ranks is told."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False))
    rule = quaver.ReplacementRule("0", torch.nn.Linear, "low_precision_linear")
    quaver.quantize_modules(model, quaver.LowPrecisionConfig(**FORMATS[case["format"]]), plan=[rule])
    fully_shard(model, reshard_after_forward=2)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        quaver.attach(optimizer, model)
    except PlanError as error:
        return str(error)
    return "attached"


def idle_case(case: dict[str, Any]) -> list[str]:
    """Experts that no rank has sent a token, where each rank has sent some to one of the first experts."""
    ledger = Ledger()
    counts = [0] * case["experts"]
    counts[dist.get_rank()] = 5
    ledger.note_expert_tokens("experts", counts)
    sum_expert_tokens(ledger)
    return ledger.idle_experts()


def gather_memory_case(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes that gathered copies hold at each layer's start in forward and backward."""
    config = config_of(case)
    import cases

    assembly = cases.assemble(config, shard_mesh(None), torch.device("cpu"))
    groups = [g for m in fsdp_modules(assembly.model) for g in m._get_fsdp_state()._fsdp_param_groups]

    def held() -> int:
        # the root's own group stays whole: it holds the embedding and the head
        outputs = [o for g in groups[1:] for p in g.fsdp_params for o in p.all_gather_outputs]
        return sum({o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in outputs}.values())

    during: list[int] = []
    after: list[int] = []
    for layer in assembly.model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: during.append(held()))
        layer.register_forward_hook(lambda *_: after.append(held()))
    ids = torch.arange(32).view(1, 32)
    assembly.model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
    result = outcome(assembly, [], [], None)
    assert dist.is_initialized()
    return {"during": during, "after": after, "end": held(), "replicas_equal": result["replicas_equal"]}
