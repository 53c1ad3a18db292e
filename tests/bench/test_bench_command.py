"""`quaver bench` as a command: how signals and a full disk end it, and what it tells on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quaver.bench
from quaver.bench import BenchReport, Result
from quaver.bench.machine import cores
from quaver.bench.sizes import Sizes
from quaver.cli.main import main

WAIT = 120
MACHINE = {
    "cpu": "A CPU", "cpu_features": [], "threads": 1, "torch": "2", "load_average_before": 0.1,
    "load_average_after": 0.2, "kernels": {"path": "torch", "reason": "no compiler"},
}  # fmt: skip

# The real command at small sizes: says on stderr which round is done, after which the test sends its signal.
MEASURES = """
    import json, sys
    import quaver.bench
    from quaver.bench.loop import BetweenSteps
    from quaver.bench.sizes import Sizes

    BetweenSteps.on_start = lambda self, start: print("begun", file=sys.stderr, flush=True)
    sizes, real = Sizes(**json.loads(sys.argv[1])), quaver.bench.run_bench

    def run(only, *, on_progress, **kwargs):
        def told(group, done, total):
            print(f"round {done}", file=sys.stderr, flush=True)
            on_progress(group, done, total)
        return real(only, sizes=sizes, on_progress=told, **kwargs)

    quaver.bench.run_bench = run
    from quaver.cli.main import main
    main(sys.argv[2:])
"""
# The command without its measurement.
WRITES = """
    import sys
    import quaver.bench
    from quaver.bench import BenchReport, Result

    machine = {
        "cpu": "A CPU", "cpu_features": [], "threads": 1, "torch": "2", "load_average_before": 0.1,
        "load_average_after": 0.2, "kernels": {"path": "torch", "reason": "no compiler"},
    }
    quaver.bench.run_bench = lambda *_, **__: BenchReport(machine, (Result("a", "b", 1.0, None, 7, 1.0, 1.0),))
    from quaver.cli.main import main
    main(sys.argv[1:])
"""


def started(script: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    # buffered, as a user's is: what a full disk has refused stays in the buffer
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "PYTHONUNBUFFERED")}
    folders = {"TMPDIR": str(streams.pop("temporary"))} if "temporary" in streams else {}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **folders, "OMP_NUM_THREADS": "1", "TORCHAO_SKIP_LOADING_SO_FILES": "1"},
        # a job in the background, as a CI may be, hands on to its children that Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **streams,
    )


@pytest.mark.parametrize(
    ("number", "code", "group", "awaited"),
    [
        (signal.SIGINT, 130, "trainer.*", "begun"),  # before the first round
        (signal.SIGINT, 130, "trainer.*", "round 2"),
        (signal.SIGTERM, 143, "trainer.*", "round 2"),
        (signal.SIGTERM, 143, "checkpoint.*", "round 1"),
    ],
)
def test_a_signal_stops_it_without_figures_and_leaves_no_folder(
    number: signal.Signals, code: int, group: str, awaited: str, small: Sizes, tmp_path: Path
) -> None:
    """In the trainer's group too, where a run would take it for the wish to end well, with figures of some rounds."""
    arguments = [json.dumps(vars(small)), "bench", "--only", group, "--pairs", "500", "--json"]
    run = started(MEASURES, *arguments, stdout=subprocess.PIPE, temporary=tmp_path)
    try:
        assert run.stderr is not None
        for line in run.stderr:
            if line == f"{awaited}\n":
                break
        run.send_signal(number)
        out, err = run.communicate(timeout=WAIT)
    finally:
        run.kill()
    assert (run.returncode, out) == (code, ""), err
    assert err.splitlines()[-1] == "stopped"
    assert "Traceback" not in err
    assert not list(tmp_path.glob("quaver-bench-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("how", [["--json"], []], ids=["json", "table"])
def test_a_full_disk_is_one_sentence(how: list[str]) -> None:
    with Path("/dev/full").open("w") as full, started(WRITES, "bench", *how, stdout=full) as run:
        _, err = run.communicate(timeout=WAIT)
    assert run.returncode == 3
    assert "Traceback" not in err
    assert err.splitlines()[-3:] == [
        "error: the figures were measured and could not be written: No space left on device",
        "  where: standard output",
        "  remedy: make room, or send the output elsewhere, and measure again",
    ]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """command(pairs, ...) -> exit code, stdout, stderr of a run whose groups are done at once."""

    def measured(only: Any, *, pairs: int, on_progress: Any, **_: Any) -> BenchReport:
        for group in ("linear", "step"):
            for done in range(pairs + 1):
                on_progress(group, done, pairs)
        return BenchReport(dict(MACHINE), (Result("linear.a", "a over b", 0.98, 1.02, 7, 0.97, 1.1),))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    monkeypatch.setattr(quaver.bench, "run_bench", measured)
    return run


@pytest.mark.parametrize(("pairs", "word"), [("1", "1 pair"), ("3", "3 pairs")])
def test_without_a_terminal_each_group_has_a_line_and_one_when_it_is_done(
    pairs: str, word: str, command: Callable[..., Any]
) -> None:
    code, out, err = command("--pairs", pairs)
    assert code == 0
    begun, done, *others = err.splitlines()
    assert begun == f"measuring linear, {word}"
    assert done.startswith("linear: done after ")
    assert done.endswith(" s")
    assert others[0] == f"measuring step, {word}"
    assert others[1].startswith("step: done after ")
    assert "linear.a" in out


def test_the_table_says_how_many_of_the_cores_were_used(command: Callable[..., Any]) -> None:
    _, out, _ = command()
    assert f"threads: 1 of {cores()} cores" in out


@pytest.mark.parametrize("threads", [str(cores() + 1), "99999999999"])
def test_more_threads_than_cores_end_with_2(threads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--threads", threads])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{threads} threads are more than the cores" in told
    assert "Traceback" not in told


def test_handlers_are_as_before_once_it_has_ended(command: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    command()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
