"""An asynchronous save gives way to the training, and what it writes is what there was when it began."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from small_runs import differing, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, dcp, load
from quaver.checkpoint.background import STEPS_BACK, give_way

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
def test_a_thread_gives_way_and_the_others_do_not() -> None:
    before = niceness()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(give_way).result()
        assert pool.submit(niceness).result() == min(19, before + STEPS_BACK)
        pool.submit(give_way).result()
        assert pool.submit(niceness).result() == min(19, before + STEPS_BACK)
    assert niceness() == before


@linux
@pytest.mark.parametrize("asynchronous", [True, False])
def test_only_threads_beside_the_training_give_way(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, wrote, hashed = niceness(), [], []
    write, describe = dcp.FileSystemWriter.write_data, CheckpointManager._finish

    def writing(self, *args):
        wrote.append(niceness())
        return write(self, *args)

    def finishing(self, *args):
        hashed.append(niceness())
        return describe(self, *args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", writing)
    monkeypatch.setattr(CheckpointManager, "_finish", finishing)
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as manager:
        manager.save(1, small_run())
        assert manager.in_flight == asynchronous
        manager.wait()
        assert not manager.in_flight
    wanted = min(19, before + STEPS_BACK) if asynchronous else before
    assert (wrote, hashed) == ([wanted], [wanted])
    assert niceness() == before


def test_steps_that_follow_do_not_reach_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_run()
    train_steps(state, 2)
    go, write = threading.Event(), dcp.FileSystemWriter.write_data

    def late(self, *args):
        assert go.wait(60)
        return write(self, *args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", late)
    wanted = tensors(state)
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        folder = manager.save(2, state)
        train_steps(state, 3)
        for buffer in state.model.buffers():
            buffer.add_(1)
        go.set()
        manager.wait()
    other = small_run(seed=9)
    load(folder, other)
    assert differing(wanted, tensors(other)) == []
    assert len(differing(wanted, tensors(state))) > 5


def test_a_copy_of_every_tensor_is_made_once() -> None:
    tree = {"model": {"a": torch.ones(3)}, "optim": {"b": torch.zeros(2, dtype=torch.int64), "c": 5}}
    staged = dcp.Writer(Path("unused"), background=True).stage(tree)
    assert staged["optim"]["c"] == 5
    for part, name in (("model", "a"), ("optim", "b")):
        assert torch.equal(staged[part][name], tree[part][name])
        assert staged[part][name].data_ptr() != tree[part][name].data_ptr()
