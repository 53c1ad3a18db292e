"""Every collective of a whole step, as the process group gets it, and the same list computed from shapes and the plan.

An event is [kind, dtype and bytes of what this rank hands over, what it is made of]. FSDP packs tensors of several
dtypes into one uint8 buffer: what went into it is taken from the tensors before they are packed, and must add up to the
buffer. No event can be missed: the process groups count their collectives themselves, and the counts must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from cases import config_of
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.assembly import Assembly, assemble, plan_on_meta
from quaver.data import Batch, Loader, prepare_data
from quaver.distributed import fsdp, like_sharded, local_tensor, shard_mesh
from quaver.distributed.fsdp import fsdp_modules
from quaver.errors import QuaverError
from quaver.low_precision import MasterWeight, low_precision_modules
from quaver.training.step import train_step

RANKS = 2
# collective -> (kind, position of what this rank hands over)
KINDS = {
    "c10d.allgather_": ("all_gather", 1),
    "c10d._allgather_base_": ("all_gather", 1),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.allreduce_": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
}
NO_COLLECTIVE = ("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")
BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
Event = list[Any]


class Collectives(TorchDispatchMode):
    """Notes each call that reaches a process group; a kind that it does not know is noted by its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._packed: dict[
            int, dict[str, int]
        ] = {}  # address of a buffer -> bytes by dtype that went into it
        self._next: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if name == "fsdp.all_gather_copy_in":
            self._packed[result[0].data_ptr()] = self._next
        elif func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in NO_COLLECTIVE:
            kind, place = KINDS.get(name, (name, None))
            given = tree_leaves(args if place is None else args[place])
            self._note(kind, [t for t in given if isinstance(t, torch.Tensor)])
        return result

    def _note(self, kind: str, tensors: list[torch.Tensor]) -> None:
        sizes = by_dtype(tensors)
        (dtype,) = sizes
        packed = self._packed.pop(tensors[0].data_ptr(), None) if kind == "all_gather" else None
        self.events.append([kind, dtype, sizes[dtype], packed or {}])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes what happens inside; the groups' own counts must grow by as many."""
        original = collectives._get_all_gather_input_metadatas

        def noted(inputs: Any) -> Any:
            self._next = by_dtype([t for of_parameter in inputs for t in of_parameter])
            return original(inputs)

        collectives._get_all_gather_input_metadatas = noted
        before = counted()
        try:
            with self:
                yield
        finally:
            collectives._get_all_gather_input_metadatas = original
        assert counted() - before == len(self.events), "a collective went past the recorder"


def by_dtype(tensors: list[torch.Tensor]) -> dict[str, int]:
    """Bytes of plain tensors by dtype."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
    return dict(sizes)


def counted() -> int:
    """Collectives that all process groups of this rank have started, as they count them."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def started(case: dict[str, Any]) -> tuple[Any, Assembly, Loader]:
    """The case's config, built model and data."""
    config = config_of(case)
    assembly = assemble(config, shard_mesh(None), torch.device("cpu"))
    data = prepare_data(config.data, seed=config.seed)
    loader = Loader(
        data.train,
        seq_len=config.data.seq_len,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    return config, assembly, loader


def bytes_case(case: dict[str, Any]) -> dict[str, Any]:
    """The events of the first step and of the second, and what shapes and plan say; what is alive after a forward."""
    if case.get("swap"):
        return {"swap": swap_case(case)}
    with looks() as found:
        return {**steps_case(case), "looks": found}


def steps_case(case: dict[str, Any]) -> dict[str, Any]:
    """As `bytes_case`, of a case that trains."""
    config, assembly, loader = started(case)
    if "hostile" in case:
        gather_beside(assembly, **case["hostile"])
    steps = []
    for _ in range(2):
        batches: list[Batch] = [loader.next() for _ in range(config.gradient_accumulation_steps)]
        recorder = Collectives()
        with recorder.watching():
            result = train_step(assembly, batches, lr=1e-3, clip_norm=config.optimizer.clip_norm)
        assert not result.skipped
        steps.append(sorted(recorder.events, key=str))
    # the shards, before a forward leaves gathered weights in their place
    kept = [local_tensor(p) for p in assembly.model.parameters()]
    with torch.no_grad():
        assembly.model(input_ids=loader.next().input_ids, use_cache=False)
    groups = [g for m in fsdp_modules(assembly.model) for g in m._get_fsdp_state()._fsdp_param_groups]
    gathered = [o for g in groups[1:] for p in g.fsdp_params for o in p.all_gather_outputs]
    codes = [t for local in kept if isinstance(local, MasterWeight) for t in local.physical.values()]
    return {
        "steps": steps,
        "computed": sorted(computed_events(config), key=str),
        "freed_after_forward": all(o.untyped_storage().size() == 0 for o in gathered),
        "local_alive": all(t.untyped_storage().size() > 0 for t in codes),
        "planned": sum(isinstance(local, MasterWeight) for local in kept),
    }


def gather_beside(assembly: Assembly, weight: str, dtype: str) -> None:
    """A hook that brings a planned weight together in high precision, beside the gather of its codes."""
    parameter = dict(assembly.model.named_parameters())[weight]
    master = local_tensor(parameter).master.detach()
    module = assembly.model.get_submodule(weight.rpartition(".")[0])

    def hook(*_: Any) -> None:
        like_sharded(parameter, master.to(getattr(torch, dtype))).full_tensor()

    module.register_forward_pre_hook(hook)


# what shapes and plan say ----------------------------------------------------------------------------------


def computed_events(config: Any) -> list[Event]:
    """All events of one step of this rank, of `RANKS`, each with the same rows."""
    plan = plan_on_meta(config)
    planned = {
        module.weight_fqn(name): kind
        for _, module in low_precision_modules(plan.model)
        for name, kind in module.WEIGHTS.items()
    }
    units: dict[str, dict[str, torch.Size]] = {}
    shapes = {name: parameter.shape for name, parameter in plan.model.named_parameters()}
    for name, shape in shapes.items():
        units.setdefault(unit_of(name), {})[name] = shape
    fmt = config.low_precision.format if config.low_precision.enabled else None
    reshard, micro_steps = config.fsdp_config.reshard_after_forward, config.gradient_accumulation_steps
    events: list[Event] = []
    for unit, members in units.items():
        plain = "float32" if unit.endswith(".gate") else "bfloat16"
        for phase in ("forward", "backward") if reshard else ("forward",):
            parts: Counter[str] = Counter()
            for name, shape in members.items():
                if name in planned:
                    both = phase == "backward" or not reshard
                    parts.update(sent_by_planned(shape, planned[name], fmt, both))
                else:
                    parts[plain] += padded(shape) // RANKS * BYTES[plain]
            dtype = next(iter(parts)) if len(parts) == 1 else "uint8"
            events += micro_steps * [["all_gather", dtype, sum(parts.values()), dict(parts)]]
        whole = sum(padded(shape) for shape in members.values())
        events += micro_steps * [["reduce_scatter", "float32", 4 * whole, {}]]
    events.append(["all_gather", "int64", 8 * micro_steps, {}])  # label tokens of each micro-batch
    events.append(["all_gather", "float64", 8 * micro_steps, {}])  # losses
    rows = sum(-(-shape[0] // RANKS) for shape in shapes.values())
    events.append(["all_gather", "float64", 8 * rows, {}])  # sums of squares of the rows, for the norm
    routers = [shape[0] for name, shape in shapes.items() if unit_of(name).endswith(".gate")]
    events.append(["all_reduce", "int64", 8 * sum(routers), {}])  # tokens of each expert, for the router bias
    return events + [
        agreed for name, kind in planned.items() for agreed in refreshed(shapes[name], kind, fmt)
    ]


def unit_of(name: str) -> str:
    """Each layer is gathered for itself, its router by itself again, and the rest with the root."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"]:
        return ""
    return ".".join(parts[:5]) if parts[3:5] == ["mlp", "gate"] else ".".join(parts[:3])


def padded(shape: torch.Size) -> int:
    """Elements over all ranks, dimension 0 rounded up to the ranks."""
    return -(-shape[0] // RANKS) * RANKS * shape[1:].numel()


def sent_by_planned(shape: torch.Size, kind: str, fmt: str, both: bool) -> dict[str, int]:
    """Bytes of codes and scales of one rank's rows [N, K] or experts [E, N, K]."""
    experts = shape[0] // RANKS if kind == "grouped" else 1
    rows = shape[-2] if kind == "grouped" else shape[0] // RANKS
    width = shape[-1]
    codes = experts * rows * width
    if fmt == "hif8":
        return {"uint8": codes, "float32": 4 * experts}
    along = codes + experts * rows * -(-width // 32)  # blocks of 32 along K, which forward contracts
    if not both:
        return {"uint8": along}
    cut = kind == "dense" and rows % 32 != 0  # column scales that two ranks share are on both already
    across = codes + (0 if cut else experts * -(-rows // 32) * width)
    return {"uint8": along + across}


def refreshed(shape: torch.Size, kind: str, fmt: str) -> list[Event]:
    """The maximum that a refresh agrees on: of a HiF8 weight, or of the column blocks that an MXFP8 shard cuts."""
    if kind == "grouped":
        return []
    if fmt == "hif8":
        return [["all_reduce", "float32", 4, {}]]
    cut = shape[0] // RANKS % 32 != 0
    return [["all_reduce", "uint8", -(-shape[0] // 32) * shape[1], {}]] if cut else []


# what arrives ----------------------------------------------------------------------------------------------


@contextmanager
def looks() -> Iterator[dict[str, list[bool]]]:
    """By weight and set of fields: each gather that is held against what was sent, and whether that settled it."""
    found: dict[str, list[bool]] = {}
    check = fsdp.check_own_part

    def noted(outputs: Any, sent: Any, metadata: Any, rank: int, fqn: str) -> bool:
        settled = check(outputs, sent, metadata, rank, fqn)
        found.setdefault(f"{fqn}: {' '.join(s.field for s in metadata.sent)}", []).append(settled)
        return settled

    fsdp.check_own_part = noted
    try:
        yield found
    finally:
        fsdp.check_own_part = check


def swap_case(case: dict[str, Any]) -> str:
    """What a step is told in which codes of both directions come back in each other's place."""
    config, assembly, loader = started(case)
    unflatten = FSDPParam._unflatten_all_gather_outputs

    def swapped(self: FSDPParam) -> Any:
        outputs = list(unflatten(self))
        if len(outputs) >= 3:
            outputs[0], outputs[2] = outputs[2], outputs[0]
        return tuple(outputs)

    FSDPParam._unflatten_all_gather_outputs = swapped
    try:
        train_step(assembly, [loader.next()], lr=1e-3, clip_norm=config.optimizer.clip_norm)
    except QuaverError as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        FSDPParam._unflatten_all_gather_outputs = unflatten
    return "trained"
