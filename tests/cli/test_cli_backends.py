"""`low_precision.backend` on a machine without the device: refused before the model is built, in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Callable[..., Any]
Tiny = Callable[..., Path]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is built is a failure."""
    from quaver.assembly import build

    def built(*_: object, **__: object) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(build, "load_hf_config", built)
    monkeypatch.setattr(build, "build_on_meta", built)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--nproc", "2"), ("--json",)])
@pytest.mark.parametrize("backend", ["npu", "cuda"])
def test_train(quaver: Run, tiny: Tiny, home: Path, backend: str, flags: tuple[str, ...]) -> None:
    ended = quaver("train", tiny(), f"low_precision.backend={backend}", *flags)
    assert (ended.code, ended.out) == (2, "")
    what, where, remedy = ended.err.splitlines()[-3:]
    assert what.startswith(f"error: backend {backend} cannot run mxfp8_e4m3/mx_block/floor@1 ")
    assert where == "  where: low_precision.backend"
    assert "backend: reference" in remedy
    assert list(home.iterdir()) == []


def test_a_model_would_have_been_built(quaver: Run, tiny: Tiny, no_model: None) -> None:
    ended = quaver("train", tiny(), "--dry-run")
    assert ended.code not in (0, 2)
    assert "a model was built" in ended.err


IMPORTS = """
import json, sys
from quaver.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
names = ("torch_npu", "quaver.backends.npu", "quaver.backends.cuda")
print(json.dumps([name for name in sys.modules if name.startswith(names)]))
"""


@pytest.mark.parametrize("enabled", [False, True])
def test_neither_is_imported_unless_it_is_chosen(tiny: Tiny, home: Path, enabled: bool) -> None:
    """Low precision off (whatever the backend's key says), and on with the reference backend: a whole run."""
    file = tiny()
    document = yaml.safe_load(file.read_text())
    document["low_precision"] = {"enabled": enabled, "backend": "reference" if enabled else "npu"}
    document["training"]["steps"] = 1
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-c", IMPORTS, "train", str(file), "--name", "one", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
    assert (home / "runs" / "one").is_dir()
