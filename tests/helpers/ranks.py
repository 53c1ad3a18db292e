"""Runs one function in several real processes with a real gloo group, and a list of cases in each.

    python tests/helpers/ranks.py MODULE FUNCTION CASES.json OUT.json      (one rank; started by `run_ranks`)

The function gets a case and returns plain data; rank 0's answers are what the caller gets. Starting processes costs
seconds, so many cases go through one start.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = ("", "training", "ranks")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(
    module: str,
    function: str,
    cases: list[Any],
    *,
    ranks: int,
    timeout: float = 600,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """`function(case)` for each case on `ranks` processes; returns rank 0's answers.

    Raises AssertionError with every rank's last output if one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        cases_file, out_file = Path(folder) / "cases.json", Path(folder) / "out.json"
        cases_file.write_text(json.dumps(cases))
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHAO_SKIP_LOADING_SO_FILES": "1",
            **(env or {}),
        }
        command = [sys.executable, str(Path(__file__)), module, function, str(cases_file), str(out_file)]
        processes = []
        for rank in range(ranks):
            log = (Path(folder) / f"rank{rank}.log").open("w")
            processes.append(
                subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=TESTS.parent,
                )
            )
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        logs = "\n".join(
            f"--- rank {rank}, exit code {codes[rank]}\n"
            + (Path(folder) / f"rank{rank}.log").read_text()[-3000:]
            for rank in range(ranks)
        )
        assert codes == [0] * ranks, logs
        return json.loads(out_file.read_text())


def main() -> None:
    """One rank: runs the cases, writes the answers on rank 0, and leaves without gloo's teardown."""
    for folder in FOLDERS:
        sys.path.append(str(TESTS / folder))
    module, function, cases_file, out_file = sys.argv[1:]
    import torch
    import torch.distributed as dist

    from quaver.distributed import init_world

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    init_world()
    run = getattr(importlib.import_module(module), function)
    answers = [run(case) for case in json.loads(Path(cases_file).read_text())]
    if dist.get_rank() == 0:
        Path(out_file).write_text(json.dumps(answers))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # ranks that tear gloo down one after the other can abort


if __name__ == "__main__":
    main()
