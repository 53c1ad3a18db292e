"""An asynchronous save gives way to the training, and what it writes is what there was when it began."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small_runs import differing, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, dcp, load, model_view, optimizer_view
from quaver.checkpoint.background import SHORTEST_PAUSE, STEPS_BACK, TAKES_TURNS, Pace, ShortTurns, give_way
from quaver.checkpoint.views import live_tree
from quaver.errors import CheckpointError, PlanError

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




def test_an_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made while the next step computes; slow as it may be, no update reaches it."""
    state = small_run()
    train_steps(state, 2)
    go, began, copy = threading.Event(), threading.Event(), dcp.copied

    def slow(live):
        began.set()
        assert go.wait(60)
        return copy(live)

    monkeypatch.setattr(dcp, "copied", slow)
    wanted = tensors(state)
    with CheckpointManager(tmp_path, asynchronous=True) as manager, ThreadPoolExecutor(1) as pool:
        folder = manager.save(2, state)
        assert began.wait(60)
        for buffer in state.model.buffers():
            buffer.add_(1)
        training = pool.submit(train_steps, state, 3)
        with pytest.raises(TimeoutError):
            training.result(0.5)
        now = tensors(state)
        assert all(torch.equal(now[name], wanted[name]) for name in wanted if name.startswith("optim."))
        go.set()
        training.result(60)
        manager.wait()
    other = small_run(seed=9)
    load(folder, other)
    assert differing(wanted, tensors(other)) == []
    assert len(differing(wanted, tensors(state))) > 5


def test_a_copy_that_fails_fails_the_save_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_run()

    def full(live):
        raise MemoryError("no room for a copy")

    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        monkeypatch.setattr(dcp, "copied", full)
        manager.save(1, state)
        train_steps(state, 1)
        with pytest.raises(CheckpointError, match="no room for a copy"):
            manager.wait()
        assert list(tmp_path.glob("step-*")) == []
        monkeypatch.undo()
        manager.save(2, state)
        manager.wait()
    assert (tmp_path / "step-00000002").is_dir()


def test_what_is_copied_is_what_a_save_at_once_writes() -> None:
    state = small_run()
    train_steps(state, 1)
    live = live_tree(state.model, state.optimizer)
    copy = dcp.copied(live)
    wanted = {"model": model_view(state.model), "optim": optimizer_view(state.model, state.optimizer)}
    for part, view in wanted.items():
        assert copy[part].keys() == view.keys()
        for name, tensor in view.items():
            assert copy[part][name].dtype == tensor.dtype
            assert torch.equal(copy[part][name], tensor)
            assert copy[part][name].data_ptr() != live[part][name].data_ptr() or part == "model"


def test_background_work_takes_its_share_and_no_more_than_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that a pause moves on by as much as it is asked for, and work by its processor time."""
    now, worked, asked = [0.0], [0.0], []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("quaver.checkpoint.background.time", SimpleNamespace(
        thread_time=lambda: worked[0], monotonic=lambda: now[0]
    ))
    pace = Pace(share=0.25, most=1.0)
    monkeypatch.setattr(pace._hurried, "wait", wait)
    pace.begin()
    for _ in range(10):  # 0.1 s of work: 0.3 s of pauses, saved up until they are worth a switch
        worked[0] += 0.01
        pace()
    assert pace.paused == pytest.approx(0.3)
    assert min(asked) >= SHORTEST_PAUSE
    worked[0] += 5.0
    pace()
    pace()
    assert pace.paused == pytest.approx(1.0)
    pace.hurry()
    again = Pace(share=0.25)
    monkeypatch.setattr(again._hurried, "wait", wait)
    again.begin()
    again.hurry()
    worked[0] += 5.0
    again()
    assert again.paused == 0.0


def test_who_waits_for_a_save_ends_its_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that would take an hour beside the training is there as soon as it is waited for."""
    monkeypatch.setattr("quaver.checkpoint.manager.Pace", lambda: Pace(share=1e-9, most=3600.0))
    state = small_run()
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        folder = manager.save(1, state)
        time.sleep(1.0)
        manager.poll()
        assert manager.in_flight
        manager.wait()
    load(folder, small_run(seed=9))


def test_python_takes_short_turns_only_while_a_save_is_written(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        manager.save(1, small_run())
        assert sys.getswitchinterval() == pytest.approx(TAKES_TURNS)
        manager.wait()
        assert sys.getswitchinterval() == before


def test_turns_stay_short_until_the_last_of_two_saves_has_ended() -> None:
    before = sys.getswitchinterval()
    one, other = ShortTurns(), ShortTurns()
    one.begin()
    one.begin()
    other.begin()
    one.end()
    one.end()
    assert sys.getswitchinterval() == pytest.approx(TAKES_TURNS)
    other.end()
    assert sys.getswitchinterval() == before


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """Set up for this test alone: accelerate keeps its state for the whole process."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_save_that_cannot_start_leaves_nothing_behind(tmp_path: Path, accelerator: Accelerator) -> None:
    before, state = sys.getswitchinterval(), small_run()
    optimizer = state.optimizer
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        with pytest.raises(PlanError, match="no step hooks"):
            manager.save(1, replace(state, optimizer=SimpleNamespace(state={}, param_groups=[])))
        assert not manager.in_flight
        assert sys.getswitchinterval() == before
        assert list(tmp_path.iterdir()) == []
        manager.save(1, replace(state, optimizer=accelerator.prepare_optimizer(optimizer)))
        train_steps(state, 1)
        manager.wait()
    assert (tmp_path / "step-00000001").is_dir()
