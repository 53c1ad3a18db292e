"""`quaver doctor` and the small things of the command line: help, version, report."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_the_document(quaver: Run, tmp_path: Path) -> None:
    import torch

    ended = quaver("doctor", "--json")
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    versions = {one["name"]: one for one in document["versions"]}
    assert versions["torch"]["version"] == torch.__version__
    assert versions["torch"]["supported"] == "==2.13.*"
    assert versions["python"]["supported"] == ">=3.11"
    assert all(one["ok"] for one in versions.values())
    backends = {one["name"]: one for one in document["backends"]}
    assert {name: one["usable"] for name, one in backends.items()} == {
        "reference": True, "npu": False, "cuda": False
    }  # fmt: skip
    from quaver.low_precision.recipe import RECIPES

    for name, backend in backends.items():
        assert [one["id"] for one in backend["recipes"]] == list(RECIPES)
        assert all((one["remedy"] is None) == (name == "reference") for one in backend["recipes"])
    why = {name: {one["needs"] for one in backend["recipes"]} for name, backend in backends.items()}
    assert why["reference"] == {"torch alone"}
    if not importlib.util.find_spec("torch_npu"):
        assert why["npu"] == {"torch_npu is not installed"}
    assert "no NVIDIA GPU multiplies hif8" in why["cuda"]
    assert document["default_corpus"]["files"] > 500
    assert document["default_corpus"]["ok"] is True
    assert document["cache"]["path"] == str(tmp_path / "cache" / "data")
    assert document["cache"]["writable"] is True
    assert document["cache"]["free_bytes"] > 0
    assert not (tmp_path / "cache").exists()  # looking makes nothing
    assert document["cpu"]["threads"] == torch.get_num_threads()


def test_what_is_missing_is_told_and_is_no_failure(
    quaver: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUAVER_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    from quaver.cli import examine

    real = examine.version
    monkeypatch.setattr(examine, "version", lambda name: "5.0.0" if name == "transformers" else real(name))
    document = json.loads(quaver("doctor", "--json").out)
    assert document["cache"]["writable"] is False
    assert "QUAVER_CACHE" in document["cache"]["remedy"]
    assert document["compiler"]["path"] is None
    assert [one["name"] for one in document["versions"] if not one["ok"]] == ["transformers"]
    table = quaver("doctor")
    assert table.code == 0
    assert "QUAVER_CACHE" in table.out


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("QUAVER_CACHE", "/proc/nope", "set QUAVER_CACHE"),
        ("QUAVER_CACHE", "/etc/passwd", "set QUAVER_CACHE"),
        ("CXX", 'g++ "', "unset CXX"),
        ("CXX", "/nonexistent", "unset CXX"),
    ],
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_kernels_that_cannot_be_built_are_told_with_the_remedy(
    quaver: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str, remedy: str
) -> None:
    for variable in ("QUAVER_KERNELS", "QUAVER_KERNEL_MARCH", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    document = quaver("doctor", "--json")
    assert document.code == 0
    kernels = json.loads(document.out)["kernels"]
    assert kernels["path"] == "torch"
    assert value in kernels["reason"]
    assert remedy in kernels["remedy"]
    table = quaver("doctor")
    assert table.code == 0
    (row,) = [line for line in table.out.splitlines() if line.startswith("cpu kernels")]
    assert " no " in row
    assert remedy in row


def test_a_switch_that_is_neither_on_nor_off(quaver: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_KERNELS", "maybe")
    ended = quaver("doctor")
    assert (ended.code, ended.out) == (2, "")
    assert "QUAVER_KERNELS" in ended.err


def npu_needs(document: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """Recipe -> name of each operator and dtype tag -> whether it is there."""
    (npu,) = [one for one in document["backends"] if one["name"] == "npu"]
    return {one["id"]: {need["name"]: need["ok"] for need in one["requirements"]} for one in npu["recipes"]}


def test_each_operator_and_tag_of_each_recipe(quaver: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that claims to be an Ascend 950 without one operator, and with all of them."""
    from helpers import npu_harness

    from quaver.backends.npu import device
    from quaver.backends.npu.tags import NEEDS

    npu_harness.install()
    facts = npu_harness.facts()
    monkeypatch.setattr(device, "probe", lambda: facts)
    whole = json.loads(quaver("doctor", "--json").out)
    for recipe, needs in npu_needs(whole).items():
        wanted = NEEDS[recipe.split("/")[0]]
        assert set(needs) == {*wanted.ops, *wanted.tags}
        assert all(needs.values())
    (npu,) = [one for one in whole["backends"] if one["name"] == "npu"]
    assert (npu["usable"], npu["device"]) == (True, "Ascend950DT_9582")
    assert npu["versions"]["cann"] == "9.1.0"
    assert all(one["remedy"] is None for one in npu["recipes"])
    less = {name: arguments for name, arguments in facts.ops.items() if name != "npu_quantize"}
    monkeypatch.setattr(device, "probe", lambda: npu_harness.facts(ops=less))
    found = json.loads(quaver("doctor", "--json").out)
    assert npu_needs(found)["hif8/current@1"]["npu_quantize"] is False
    (npu,) = [one for one in found["backends"] if one["name"] == "npu"]
    assert [one["usable"] for one in npu["recipes"]] == [True, True, False]
    assert "op npu_quantize is missing" in npu["recipes"][2]["needs"]
    table = quaver("doctor").out
    for word in ("Ascend950DT_9582", "op npu_quantize", "not registered", "dtype hifloat8", "torch_npu 2.13.0"):
        assert word in table


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_nothing_of_an_accelerator_is_imported_that_is_not_there(quaver: Run) -> None:
    assert quaver("doctor").code == 0
    assert "torch_npu" not in sys.modules


def test_help_needs_no_torch_and_is_quick(home: Path) -> None:
    """Half a second where nothing else runs; the median of five calls lets others run too."""
    code = (
        "import sys\nfrom quaver.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)\n"
    )
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
        seconds.append(time.monotonic() - began)
        assert ended.returncode == 0, ended.stderr
        assert "Usage: quaver" in ended.stdout
    assert sorted(seconds)[2] < 1.5


@pytest.mark.parametrize("verb", ["train", "plan", "report", "export", "doctor"])
def test_every_verb_has_help_with_an_example(quaver: Run, verb: str) -> None:
    ended = quaver(verb, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert f"Example: quaver {verb} " in " ".join(ended.out.split())


def test_the_verbs_are_those_of_this_release(quaver: Run) -> None:
    ended = quaver("--help")
    from quaver.cli.main import app

    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert names == ["train", "plan", "report", "export", "bench", "doctor"]
    assert all(f"│ {name} " in ended.out for name in names)


def test_version(quaver: Run) -> None:
    from importlib.metadata import version

    ended = quaver("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"quaver {version('quaver')}\n", "")


def test_report_over_runs(quaver: Run, tiny: Callable[..., Path], home: Path) -> None:
    for name in ("one", "two"):
        assert quaver("train", tiny(), "training.steps=2", "--name", name).code == 0
    both = quaver("report", "runs/one", "runs/two", "--out", "both.html")
    assert (both.code, both.out, both.err) == (0, "both.html\n", "")
    page = (home / "both.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("one") > 1
    assert page.count("two") > 1
    assert quaver("report", "runs/one", "runs/two").out == "report.html\n"
    assert quaver("report", "runs/one").out == "runs/one/report.html\n"
    missing = quaver("report", "runs/three")
    assert (missing.code, missing.out) == (2, "")
    assert "runs/three" in missing.err
    (home / "mine.html").write_text("mine")
    refused = quaver("report", "runs/one", "--out", "mine.html")
    assert refused.code == 2
    assert (home / "mine.html").read_text() == "mine"
