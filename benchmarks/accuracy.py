"""The sharp test of a format: continue one BF16 run in BF16, MXFP8 and HiF8, and compare the losses.

    python benchmarks/accuracy.py --out runs/accuracy            (about 20 minutes on 2 cores)

For each of three seeds configs/tiny/continue-base.yaml trains 300 steps in BF16 and saves; from that state each format
goes on for 150 steps over the same batches while the rate falls to 0. The first validation (before any step) shows
what quantising the weights and activations alone does, the last what training with them did. Both must lie within 0.1%
of BF16's. Runs from scratch could not tell that: seeds of one format differ by ten times as much.

Two runs go side by side with one thread each. Finished runs in --out are kept and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORMATS, SEEDS, ALLOWED = ("bf16", "mxfp8", "hif8"), (1, 2, 3), 1e-3


def one_run(kind: str, seed: int, out: Path, overrides: list[str]) -> Path:
    """Trains configs/tiny/continue-<kind>.yaml in a process of its own, unless its folder is complete."""
    folder = out / f"{kind}-{seed}"
    if (folder / "report.html").exists():
        return folder
    command = [sys.executable, "-m", "quaver", "train", str(ROOT / f"configs/tiny/continue-{kind}.yaml")]
    command += [f"name={kind}-{seed}", "training.num_threads=1", *overrides, "--out", str(folder)]
    if folder.exists():
        raise SystemExit(f"{folder} is there, but its run has not finished: remove it and start again")
    log = out / f"{kind}-{seed}.log"
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    if done.returncode:
        raise SystemExit(f"{folder} failed:\n{log.read_text()[-2000:]}")
    print(f"done: {folder}", flush=True)
    return folder


def base_run(seed: int, out: Path, steps: int) -> Path:
    """The BF16 run that the others go on from; it saves once, at its end."""
    warmup = min(30, steps // 10)  # a trial of a few steps has no room for 30
    changes = [f"training.steps={steps}", f"checkpoint.every={steps}"]
    return one_run("base", seed, out, [f"seed={seed}", *changes, f"optimizer.schedule.warmup_steps={warmup}"])


def continued_run(fmt: str, seed: int, out: Path, steps: int) -> Path:
    """One format from the base run of its seed; the same batches whatever the format."""
    start = f"checkpoint.load_from={json.dumps(str((out / f'base-{seed}').resolve()))}"
    return one_run(fmt, seed, out, [f"seed={1000 + seed}", f"training.steps={steps}", start])


def losses(folder: Path) -> tuple[float, float]:
    """Validation losses before the first step and after the last."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: float(line["val_loss"]) for line in lines if "val_loss" in line}
    if 0 not in found:
        raise SystemExit(f"{folder} has no validation before its first step")
    return found[0], found[max(found)]


def judge(table: dict[tuple[str, int], tuple[float, float]]) -> bool:
    """Prints both losses of each run and their relative difference to BF16's; True if all are small enough."""
    ok = True
    print(f"{'seed':>4} {'format':8} {'first':>9} {'of BF16':>9} {'last':>9} {'of BF16':>9}")
    for (fmt, seed), (first, last) in table.items():
        base = table["bf16", seed]
        differences = (first / base[0] - 1, last / base[1] - 1)
        within = all(abs(difference) < ALLOWED for difference in differences)
        ok &= within
        print(
            f"{seed:4} {fmt:8} {first:9.5f} {differences[0]:+9.3%} {last:9.5f} {differences[1]:+9.3%}"
            + ("" if within else f"   NOT within {ALLOWED:.1%}")
        )
    return ok


def main() -> int:
    """Runs, prints, judges."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--base-steps", type=int, default=300, help="steps of the BF16 run")
    parser.add_argument("--steps", type=int, default=150, help="steps of each continuation")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(fmt, seed) for seed in SEEDS for fmt in FORMATS]
    with ThreadPoolExecutor(2) as pool:
        bases = list(pool.map(lambda seed: base_run(seed, out, arguments.base_steps), SEEDS))
        folders = list(pool.map(lambda job: continued_run(*job, out, arguments.steps), jobs))
    ok = judge({job: losses(folder) for job, folder in zip(jobs, folders)})
    runs = [str(folder) for folder in (*bases, *folders)]
    command = [sys.executable, "-m", "quaver", "report", *runs, "--out", str(out / "report.html")]
    subprocess.run(command, check=True)
    print("all held" if ok else "NOT all held")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
