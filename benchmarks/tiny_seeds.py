"""Nine runs from scratch: configs/tiny in BF16, MXFP8 and HiF8 over three seeds, and what they say together.

    python benchmarks/tiny_seeds.py --out runs/tiny-seeds            (about 40 minutes on 2 cores)

Two runs go side by side with one thread each. It prints the losses, holds the formats' means against BF16's
(no worse by more than 1%, or twice the standard error of the difference, whichever is larger), compares step 1
from equal weights, and writes a report that overlays all runs. Runs that are there already are not repeated.
Runs from scratch this short measure chaos more than formats: seeds of one format differ by about 1%.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORMATS, SEEDS = ("bf16", "mxfp8", "hif8"), (1, 2, 3)


def one_run(fmt: str, seed: int, out: Path, steps: int) -> Path:
    """Trains one run in a process of its own, unless its folder is complete."""
    folder = out / f"{fmt}-{seed}"
    if (folder / "ledger.json").exists():
        return folder
    overrides = [f"seed={seed}", f"name={fmt}-{seed}", "training.num_threads=1", f"training.steps={steps}"]
    command = [sys.executable, "-m", "quaver", "train", str(ROOT / f"configs/tiny/{fmt}.yaml"), *overrides]
    log = out / f"{fmt}-{seed}.log"
    with log.open("w") as file:
        subprocess.run(
            [*command, "--out", str(folder)],
            check=True,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    print(f"done: {folder}", flush=True)
    return folder


def losses(folder: Path) -> list[float]:
    """Validation losses of a run, the first (before step 1) and the last among them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float(line["val_loss"]) for line in lines if "val_loss" in line]


def first_step(fmt: str, seed: int) -> tuple[float, object]:
    """Loss and whole gradient of the first batch, from the seed's initial weights."""
    import torch

    from quaver.assembly import assemble
    from quaver.config import load_config
    from quaver.data import Loader, prepare_data
    from quaver.distributed import init_world, local_tensor, shard_mesh
    from quaver.training import token_nats

    config = load_config(ROOT / f"configs/tiny/{fmt}.yaml", [f"seed={seed}"])
    init_world()
    assembly = assemble(config, shard_mesh(None), torch.device("cpu"))
    data = prepare_data(config.data, seed=config.seed)
    loader = Loader(
        data.train,
        seq_len=config.data.seq_len,
        micro_batch_size=config.training.micro_batch_size,
        seed=config.seed,
    )
    batch = loader.next()
    loss = token_nats(assembly.model, batch) / batch.labels.numel()
    loss.backward()
    grads = [
        local_tensor(p.grad).flatten().double() for p in assembly.model.parameters() if p.grad is not None
    ]
    return loss.item(), torch.cat(grads)


def main() -> int:
    """Runs, prints, judges."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-seeds"))
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = [(fmt, seed) for seed in SEEDS for fmt in FORMATS]
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda job: one_run(*job, arguments.out, arguments.steps), jobs))
    table = {job: losses(folder) for job, folder in zip(jobs, folders)}
    ok = True
    print(f"{'run':10} {'first':>8} {'last':>8} {'fallen':>8}")
    for (fmt, seed), values in table.items():
        print(f"{fmt}-{seed:<4} {values[0]:10.5f} {values[-1]:8.5f} {1 - values[-1] / values[0]:8.1%}")
    base = [table["bf16", seed][-1] for seed in SEEDS]
    fallen = min(1 - table["bf16", seed][-1] / table["bf16", seed][0] for seed in SEEDS)
    ok &= fallen >= 0.40
    print(f"BF16 has fallen by at least {fallen:.1%} (wanted 40%)")
    for fmt in FORMATS[1:]:
        mine = [table[fmt, seed][-1] for seed in SEEDS]
        worse = statistics.mean(mine) / statistics.mean(base) - 1
        error = math.sqrt(statistics.variance(mine) / len(mine) + statistics.variance(base) / len(base))
        allowed = max(0.01, 2 * error / statistics.mean(base))
        ok &= worse <= allowed
        print(
            f"{fmt}: mean {statistics.mean(mine):.5f}, "
            f"{worse:+.2%} of BF16's {statistics.mean(base):.5f} (allowed {allowed:+.2%})"
        )
    for seed in SEEDS:
        loss, gradient = first_step("bf16", seed)
        for fmt in FORMATS[1:]:
            other, other_gradient = first_step(fmt, seed)
            cosine = torch.nn.functional.cosine_similarity(gradient, other_gradient, dim=0).item()
            ok &= abs(other / loss - 1) < 1e-3 and cosine > 0.99
            print(
                f"step 1, seed {seed}, {fmt}: loss {other:.5f} "
                f"({other / loss - 1:+.4%} of {loss:.5f}), cosine {cosine:.5f}"
            )
    subprocess.run(
        [
            sys.executable,
            "-m",
            "quaver",
            "report",
            *map(str, folders),
            "--out",
            str(arguments.out / "report.html"),
        ],
        check=True,
    )
    print("all held" if ok else "NOT all held")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
