"""Where the time of the benchmark's training step goes, format by format: `python benchmarks/step_profile.py`.

Each operation's own time comes from torch's profiler, the C++ kernels' from a mark around each call. What these do not
explain of a profiled step is Python, autograd and dispatch, the profiler's own work among it; the last row is a step
without the profiler. One thread. The table is Markdown, for docs/speed.md.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quaver.backends.native import kernels
from quaver.bench.policies import LABELS
from quaver.bench.sizes import FULL
from quaver.bench.steps import built, one_batch, our_step, world

FORMATS = ("bf16", "mxfp8", "hif8")
STEPS = 5
MARK = "kernel "  # before the name of a C++ kernel

# an operation belongs to the first kind that names it
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise", "_grouped_mm"),
    "quantising, decoding (C++)": ("quaver_mx_quantize", "quaver_mx_decode", "quaver_mx_pack", "quaver_hif8"),
    "experts' SwiGLU, gather, combine (C++)": ("quaver_mx_experts", "quaver_fill", "quaver_combine", "quaver_products"),
    "copies and casts": ("copy_", "cat", "_to_copy", "clone", "quaver_widen", "fill_", "zero_", "_chunk_cat"),
    "softmax, loss": ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    "optimiser": ("_fused_adamw_",),
    "indexing, routing": (
        "index_select", "index", "_index_put_impl_", "index_add_", "scatter_", "gather", "topk", "sort", "bincount",
        "embedding", "embedding_dense_backward",
    ),
    "element-wise, norms, rotary": (
        "mul", "mul_", "add", "add_", "sub", "sub_", "div", "div_", "pow", "pow_", "neg", "rsqrt", "silu", "sigmoid",
        "silu_backward", "sigmoid_backward", "sum", "mean", "sqrt", "square", "cumsum", "_foreach_mul_", "where",
        "masked_fill_", "maximum", "amax",
    ),
}  # fmt: skip
REST = "other operations"
PYTHON = "Python, autograd, dispatch"


def kind_of(name: str) -> str:
    """The kind of an operation or a marked kernel."""
    if name.startswith(MARK):
        bare = name.removeprefix(MARK)
        return next(kind for kind, names in KINDS.items() if any(bare.startswith(n) for n in names))
    bare = name.removeprefix("aten::").removeprefix("mkldnn::")
    return next((kind for kind, names in KINDS.items() if bare in names), REST)


def mark_kernels() -> None:
    """From here on the profiler sees every call of a C++ kernel."""
    plain = kernels.call

    def marked(name: str, *arguments: Any) -> int:
        with record_function(MARK + name):
            return plain(name, *arguments)

    kernels.call = marked


def operations(events: Any) -> Counter[str]:
    """Milliseconds a step of each kind; autograd's and modules' own entries are left to the rest."""
    found: Counter[str] = Counter()
    for event in events:
        if event.key.startswith(("aten::", "mkldnn::", MARK)):
            found[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / STEPS
    return found


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    batch = one_batch(FULL)
    totals: dict[str, float] = {}  # milliseconds of a profiled step
    shares: dict[str, Counter[str]] = {}
    with world():
        assemblies = {fmt: built(fmt, FULL) for fmt in FORMATS}
        times: dict[str, list[float]] = {fmt: [] for fmt in FORMATS}
        for turn in range(STEPS + 2):
            for fmt in FORMATS:
                began = time.perf_counter()
                our_step(assemblies[fmt], batch)
                times[fmt] += [1e3 * (time.perf_counter() - began)] if turn >= 2 else []
        mark_kernels()
        for fmt, assembly in assemblies.items():
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                began = time.perf_counter()
                for _ in range(STEPS):
                    our_step(assembly, batch)
                totals[fmt] = 1e3 * (time.perf_counter() - began) / STEPS
            shares[fmt] = operations(seen.key_averages())
            shares[fmt][PYTHON] = totals[fmt] - sum(shares[fmt].values())
            assembly.router_bias.close()
    print("| ms a step | " + " | ".join(LABELS.get(fmt, fmt.upper()) for fmt in FORMATS) + " |")
    print("|---|" + "---|" * len(FORMATS))
    for kind in [*KINDS, REST, PYTHON]:
        row = [f"{shares[f][kind]:.0f} ({shares[f][kind] / totals[f]:.1%})" for f in FORMATS]
        print(f"| {kind} | " + " | ".join(row) + " |")
    print("| a profiled step | " + " | ".join(f"{totals[fmt]:.0f}" for fmt in FORMATS) + " |")
    print("| a step | " + " | ".join(f"{statistics.median(times[fmt]):.0f}" for fmt in FORMATS) + " |")


if __name__ == "__main__":
    main()
