"""Our schema file against the strings of an installed torch_npu wheel, and our harness against its shape functions.

    pip install --no-deps --target FOLDER torch_npu==2.13.0
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=FOLDER pytest tests/backends/npu/test_npu_wheel.py

The variable is needed with any torch_npu on a machine without CANN: `import torch` would try to load it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.npu_harness.schemas import SCHEMAS
from helpers.npu_harness.wheel import folder, missing_strings

TESTS = Path(__file__).resolve().parents[2]
wheel = pytest.mark.skipif(folder() is None, reason="torch_npu is not installed; the module's first lines say how")

SHAPES = """
import torch
from helpers import npu_harness
from helpers.npu_harness import wheel
from helpers.npu_harness.recording import Recorder
from helpers.policies import RECIPES, policy
from helpers.passes import one_pass

npu_harness.install()
calls = []
for recipe in RECIPES:
    backend = npu_harness.backend()
    with Recorder() as recorder:
        one_pass(policy(recipe, backend))
    calls += recorder.calls.values()
wanted = [(call, [(t.shape, t.dtype) for t in call.run()]) for call in calls]
wheel.load_shape_functions(wheel.folder())

def on_meta(value):
    if isinstance(value, list):
        return [on_meta(one) for one in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value

for call, outputs in wanted:
    found = call.run(**{name: on_meta(value) for name, value in call.arguments.items()})
    assert all(t.is_meta for t in found), call.op
    assert [(t.shape, t.dtype) for t in found] == outputs, (call.op, found, outputs)
print(len(wanted), "calls,", len({call.op for call in calls}), "operators")
"""


def test_every_string_is_data_of_its_own():
    names = [schema.partition("(")[0] for schema in SCHEMAS]
    assert len(names) == len(set(names)) == 118


@wheel
def test_the_strings_are_the_wheels():
    if not version("torch_npu").startswith("2.13."):
        pytest.skip(f"torch_npu {version('torch_npu')} is installed; the file is that of 2.13")
    package = folder()
    assert missing_strings(package, SCHEMAS) == []
    changed = [schema.replace("scale_alg=0", "scale_alg=2") for schema in SCHEMAS]
    assert len(missing_strings(package, changed)) == sum("scale_alg=0" in schema for schema in SCHEMAS)


@wheel
def test_the_wheels_shape_functions_agree():
    """Every call that the adapter makes is taken by them, and gives the shapes and dtypes that the harness gives."""
    paths = [str(TESTS), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", SHAPES],
        env=env,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.endswith("7 operators\n")
