"""What a terminal shows: foreign text is escaped and never markup; known noise goes, the rest stays."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from quaver.cli.console import printable, show_error
from quaver.cli.figures import Tally, clock, count
from quaver.cli.progress import ProgressView
from quaver.errors import PlanError
from quaver.quiet import KNOWN_NOISE, drop_known_noise
from quaver.training import RunStart, StepResult, Validation

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40, color_system="truecolor")


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def view() -> Iterator[tuple[Console, ProgressView]]:
    console = terminal()
    with ProgressView(console, "tiny") as entered:
        entered.on_start(
            RunStart(
                folder=Path("runs/[bold]x"), parameters=6_700_000, low_precision_sites=34,
                recipe="hif8/current@1", device="cpu", threads=2, steps=4, tokens_per_step=2048,
            )
        )  # fmt: skip
        yield console, entered


def test_the_start_line(view: tuple[Console, ProgressView]) -> None:
    plain = ANSI.sub("", text_of(view[0]))
    assert (
        "tiny · 6.7 M parameters · hif8/current@1 in 34 GEMM sites · cpu, 2 threads · 2,048 tokens/step · "
        in plain.replace("\n", " ")
    )
    assert "runs/[bold]x" in plain  # brackets are text


def test_samples_are_neither_markup_nor_control(view: tuple[Console, ProgressView]) -> None:
    console, entered = view
    sample = {"prompt": "[b]def[/b] ", "text": "[red]f[/red](x):\n\treturn\x1b[2J \x07\x9b1m \u202e"}
    entered.on_validation(0, Validation(5.5, 7.9), [sample])
    raw = text_of(console)
    assert "\x1b[2J" not in raw
    assert "\x07" not in raw
    assert "\x9b" not in raw
    assert "\u202e" not in raw
    lines = [line.strip("│ ") for line in ANSI.sub("", raw).splitlines()]
    assert "[b]def[/b] [red]f[/red](x):" in lines
    assert r"return\x1b[2J \x07\x9b1m \u202e" in lines
    assert any(
        line == "step     0   val loss 5.5000 nats/token   7.900 bits/byte   before training"
        for line in lines
    )


def test_bar_skipped_steps_and_the_stop_message(view: tuple[Console, ProgressView]) -> None:
    console, entered = view
    times = iter([10.0, 10.0, 10.5, 13.0, 15.0])  # the first step, of 2 s, ends at 10
    entered.tally.now = lambda: next(times)

    def step(number: int, loss: float, tokens_per_s: float) -> str:
        result = StepResult(loss, 1.0, 5e-4, 2048, skipped=math.isnan(loss))
        entered.on_step(number, result, tokens_per_s)
        entered._training.refresh()
        return ANSI.sub("", text_of(console))

    step(1, 3.25, 1024.0)
    assert "step     2   skipped: loss nan" in step(2, math.nan, 4096.0)
    entered.on_validation(2, Validation(3.0, 4.3), [])
    shown = step(3, 3.0, 2048.0)
    # 4096 tokens in 2 s and 0.5 s
    assert "step     2   val loss 3.0000 nats/token   4.300 bits/byte   1,638 tokens/s   1 skipped" in shown
    assert "3/4 loss 3.0000  lr 5.0e-04  2,048 tokens/s  0:02 left" in shown  # (13 - 8) s a step and a third
    entered.on_validation(3, Validation(2.9, 4.2), [])  # its speed is that of the steps since the last one
    entered.on_message("stopping after this step")
    entered._training.refresh()
    shown = ANSI.sub("", text_of(console))
    assert "step     3   val loss 2.9000 nats/token   4.200 bits/byte   2,048 tokens/s   1 skipped" in shown
    assert "\nstopping after this step" in shown.replace("\r", "\n")
    assert "\nstopping ━" in step(4, 2.5, 2048.0).replace("\r", "\n")
    assert (entered.bits_per_byte, entered.skipped_text) == (", 4.200 bits/byte", ", 1 skipped")


def test_errors_on_a_terminal_and_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = PlanError("it [b]does[/b] not fit\x1b[2J", where="layer [0]", remedy="widen it")
    show_error(error)
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == "error: it [b]does[/b] not fit\\x1b[2J\n  where: layer [0]\n  remedy: widen it\n"
    console = terminal()
    monkeypatch.setattr("quaver.cli.console.err", lambda: console)
    show_error(error)
    raw = text_of(console)
    assert "\x1b[2J" not in raw
    plain = ANSI.sub("", raw)
    for words in ("PlanError", r"it [b]does[/b] not fit\x1b[2J", "where  layer [0]", "remedy  widen it"):
        assert words in plain


def test_printable() -> None:
    assert printable("é 你 😀 \t\n\\x") == "é 你 😀 \\t\n\\x"
    assert printable("a\rb\x7f\x85\u2028") == "a\\rb\\x7f\\x85\\u2028"


def test_numbers() -> None:
    given = (999, 1000, 113_280, 999_900, 6_700_000, 16_585_005_056, 2e12)
    assert [count(number) for number in given] == ["999", "1 k", "113 k", "1 M", "6.7 M", "16.6 B", "2 T"]
    assert [clock(seconds) for seconds in (0, 59.6, 75, 3700)] == ["0:00", "1:00", "1:15", "1:01:40"]
    assert Tally(total_steps=5).time_left() == "-:--"


def test_only_the_known_noise_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    drop_known_noise()
    drop_known_noise()
    assert [len(logging.getLogger(name).filters) for name in KNOWN_NOISE] == [1, 1]
    torchao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    for logger in (torchao, pytree):
        logger.addHandler(caplog.handler)
    torchao.warning("Failed to load %s: %s", "/x/site-packages/torchao/_C_mxfp8.cpython-310.so", "no")
    torchao.warning("Failed to load the model")
    pytree.warning(
        "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by torch.compile"
    )
    pytree.warning("something else about <enum 'KernelPreference'>")
    for logger in (torchao, pytree):
        logger.removeHandler(caplog.handler)
    kept = [record.getMessage() for record in caplog.records]
    assert set(kept) == {"Failed to load the model", "something else about <enum 'KernelPreference'>"}


def test_warnings_of_the_package_are_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    from quaver.cli.console import show_warnings

    show_warnings()
    show_warnings()
    logging.getLogger("quaver.data.prepare").warning("the token cache %s is damaged", "/x\x1b")
    logging.getLogger("quaver.data.prepare").info("not shown")
    assert capsys.readouterr().err == "warning: the token cache /x\\x1b is damaged\n"
