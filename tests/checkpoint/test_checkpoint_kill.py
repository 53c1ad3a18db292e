"""SIGKILL at every phase of a save, and before every flush, rename and deletion: the run always has a start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from killed_saves import PHASES
from small_runs import differing, scatter_generators, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, find_latest, load

HERE = Path(__file__).parent


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_killed_save_leaves_the_one_before_or_is_whole(tmp_path: Path, asynchronous: bool) -> None:
    result = subprocess.run(
        [sys.executable, str(HERE / "killed_saves.py"), str(tmp_path), str(asynchronous)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    killed = json.loads(result.stdout)
    flushes = [moment for moment in killed if moment.startswith("flush")]
    assert set(PHASES) <= set(killed)
    assert 9 <= len(flushes) < 19, "the counting of flushes does not end with the last one"
    if not asynchronous:
        assert {"tensor-10", "rename-01", "rename-02", "rename-03", "unlink-01", "unlink-04"} <= set(killed)
    state = small_run()
    scatter_generators(5)
    train_steps(state, 1)
    wanted = {1: tensors(state)}
    train_steps(state, 1)
    wanted[2] = tensors(state)
    found_steps = {}
    for moment in killed:
        folder = tmp_path / moment
        found = find_latest(folder)
        assert found is not None, moment
        found_steps[moment] = found.manifest.step
        resumed = small_run(seed=3)
        load(found.path, resumed, verified=True)
        assert differing(tensors(resumed), wanted[found.manifest.step]) == [], moment
        messages: list[str] = []
        with CheckpointManager(folder, keep=1, on_message=messages.append) as manager:
            assert bool(list(folder.glob("*.tmp-*"))) is False
            manager.save(2, state)
            again = manager.find_latest()
        assert again is not None
        assert again.path.name == "step-00000002"
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"], moment
        if found.skipped:
            assert any("left over" in message for message in messages), moment
    before = [moment for moment in killed if found_steps[moment] == 1]
    assert {"writing", "manifest", "rename"} <= set(before)
    assert not {"latest", "prune", "done"} & set(before)
    assert len(before) >= 10
