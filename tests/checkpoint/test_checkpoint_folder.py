"""The checkpoints folder of a run: what is kept, what is cleaned, and what a save that cannot be written leaves."""

import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from small_runs import differing, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, dcp, find_latest, load
from quaver.errors import CheckpointError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_steps(manager: CheckpointManager, state, *steps: int) -> None:
    for step in steps:
        train_steps(state, 1)
        manager.save(step, state)


def save_and_wait(manager: CheckpointManager, step: int, state) -> None:
    manager.save(step, state)
    manager.wait()


def test_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=2) as manager:
        save_steps(manager, small_run(), 10, 20, 30, 100)
    assert names(tmp_path) == ["latest", "step-00000030", "step-00000100"]
    assert (tmp_path / "latest").read_text() == "step-00000100\n"


def test_latest_is_replaced_and_never_written_over(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        save_steps(manager, small_run(), 10)
        (tmp_path / "as-it-was").hardlink_to(tmp_path / "latest")
        save_steps(manager, small_run(), 20)
    assert (tmp_path / "as-it-was").read_text() == "step-00000010\n"
    assert (tmp_path / "latest").read_text() == "step-00000020\n"


def test_broken_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=2) as manager:
        save_steps(manager, small_run(), 10, 20)
        os.truncate(tmp_path / "step-00000020" / "__0_0.distcp", 100)
        save_steps(manager, small_run(), 30)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020", "step-00000030"]


def test_a_protected_one_is_never_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1) as manager:
        save_steps(manager, small_run(), 10)
        manager.protect(tmp_path / "step-00000010")
        save_steps(manager, small_run(), 20, 30)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000030"]


def test_phases_are_told_in_their_order(tmp_path: Path) -> None:
    told = []
    with CheckpointManager(tmp_path, on_phase=lambda *phase: told.append(phase)) as manager:
        manager.save(5, small_run())
        manager.save(5, small_run())  # just saved: nothing to do
    assert told == [(5, p) for p in ("writing", "manifest", "rename", "latest", "prune", "done")]


def test_the_same_step_again_replaces_the_older_save(tmp_path: Path) -> None:
    state = small_run()
    with CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(5, state)
    train_steps(state, 1)
    with CheckpointManager(tmp_path, keep=1) as manager:
        folder = manager.save(5, state)
    assert names(tmp_path) == ["latest", "step-00000005"]
    other = small_run(seed=3)
    load(folder, other)
    assert differing(tensors(other), tensors(state)) == []


def test_a_crash_while_replacing_loses_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, small_run())
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.old-00c0ffee")
    (tmp_path / "latest.tmp-00c0ffee").write_text("step-")
    (tmp_path / "step-00000006.tmp-00c0ffee").mkdir()
    (tmp_path / "notes.tmp-of-mine").write_text("not a save")
    told: list[str] = []
    with CheckpointManager(tmp_path, on_message=told.append) as manager:
        found = manager.find_latest()
    assert found is not None
    assert names(tmp_path) == ["latest", "notes.tmp-of-mine", "step-00000005"]
    assert told == [
        "removed latest.tmp-00c0ffee, left over from a save that did not finish",
        "put step-00000005 back, which a crash had left half replaced",
        "removed step-00000006.tmp-00c0ffee, left over from a save that did not finish",
    ]


def check_last_good(folder: Path, wanted) -> None:
    found = find_latest(folder)
    assert found is not None
    assert names(folder) == ["latest", found.path.name], "something was left behind"
    other = small_run(seed=3)
    load(found.path, other)
    assert differing(tensors(other), wanted) == []


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [300, 2_000, 12_000])
def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, asynchronous: bool, room: int) -> None:
    """A real one: a tmpfs of 256 KiB of which only `room` bytes or so are left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        state = small_run()
        with CheckpointManager(disk / "checkpoints", asynchronous=asynchronous) as manager:
            save_steps(manager, state, 1)
            manager.wait()
            wanted = tensors(state)
            fill(disk / "filler", room)
            train_steps(state, 1)
            with pytest.raises(CheckpointError, match="No space left on device") as caught:
                save_and_wait(manager, 2, state)
            assert caught.value.exit_code == 3
            assert str(disk / "checkpoints" / "step-00000002.tmp-") in caught.value.where
            check_last_good(disk / "checkpoints", wanted)
            (disk / "filler").unlink()
            manager.save(3, state)  # with room again it goes on
        assert find_latest(disk / "checkpoints").path.name == "step-00000003"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path, leave: int) -> None:
    """Takes the disk's room but for whole pages that hold `leave` bytes."""
    status = os.statvfs(path.parent)
    pages = status.f_bavail - -(-leave // status.f_frsize)
    path.write_bytes(b"\0" * (pages * status.f_frsize))


def test_a_read_only_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        state = small_run()
        with CheckpointManager(disk / "checkpoints") as manager:
            save_steps(manager, state, 1)
            wanted = tensors(state)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            with pytest.raises(CheckpointError, match="Read-only file system") as caught:
                manager.save(2, state)
            assert caught.value.exit_code == 3
            check_last_good(disk / "checkpoints", wanted)
            with pytest.raises(CheckpointError, match=r"Read-only file system(.|\n)*disk/other"):
                CheckpointManager(disk / "other")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_without_permission_leaves_the_last_good_one(tmp_path: Path) -> None:
    state, folder, root = small_run(), tmp_path / "checkpoints", os.geteuid() == 0
    with CheckpointManager(folder) as manager:
        save_steps(manager, state, 1)
        wanted = tensors(state)
        folder.chmod(0o555)
        if root:
            os.seteuid(65534)  # root may write everywhere
        try:
            with pytest.raises(CheckpointError, match="Permission denied") as caught:
                manager.save(2, state)
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)
    assert caught.value.exit_code == 3
    assert "step-00000002.tmp-" in caught.value.where
    check_last_good(folder, wanted)


def test_a_path_under_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"Not a directory(.|\n)*file/checkpoints") as caught:
        CheckpointManager(tmp_path / "file" / "checkpoints")
    assert caught.value.exit_code == 3


def test_a_folder_that_went_away_is_named(tmp_path: Path) -> None:
    state = small_run()
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        shutil.rmtree(tmp_path / "checkpoints")
        with pytest.raises(CheckpointError, match=r"No such file or directory(.|\n)*step-00000001\.tmp-"):
            manager.save(1, state)


def test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    state = small_run()
    with CheckpointManager(tmp_path) as manager:
        (tmp_path / "latest" / "in-the-way").mkdir(parents=True)
        with pytest.raises(CheckpointError, match="the checkpoint is complete, but"):
            manager.save(1, state)
    assert (tmp_path / "step-00000001" / "manifest.json").exists()
    assert not list(tmp_path.glob("latest.tmp-*"))


# beside the training -----------------------------------------------------------------------------------------


class Gate:
    """Holds the writing thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        finish = dcp.Writer.finish

        def held(writer, **results):
            assert self.open.wait(60)
            finish(writer, **results)

        monkeypatch.setattr(dcp.Writer, "finish", held)


def test_training_goes_on_and_what_is_saved_is_the_moment_of_the_call(tmp_path: Path, monkeypatch) -> None:
    gate, state = Gate(monkeypatch), small_run()
    train_steps(state, 1)
    wanted, cursor = tensors(state), state.loader.cursor
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        folder = manager.save(1, state)
        assert not folder.exists()
        train_steps(state, 3)
        manager.poll()  # not ended: goes on
        assert differing(wanted, tensors(state)) != []
        gate.open.set()
        manager.wait()
        assert folder.exists()
    other = small_run(seed=3)
    load(folder, other)
    assert differing(wanted, tensors(other)) == []
    assert other.loader.cursor == cursor


def test_at_most_one_save_is_in_flight(tmp_path: Path, monkeypatch) -> None:
    gate, state = Gate(monkeypatch), small_run()
    opener = threading.Timer(0.3, gate.open.set)
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        manager.save(1, state)
        opener.start()
        manager.save(2, state)
        assert (tmp_path / "step-00000001").exists(), "the second began before the first had ended"
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("where", ["poll", "save", "wait", "close"])
def test_the_error_of_a_save_beside_comes_up_at_the_next_call(
    tmp_path: Path, monkeypatch, where: str
) -> None:
    def full(writer, **results):
        raise OSError(28, "No space left on device")

    state = small_run()
    manager = CheckpointManager(tmp_path, asynchronous=True)
    save_steps(manager, state, 1)
    manager.wait()
    wanted = tensors(state)
    monkeypatch.setattr(dcp.Writer, "finish", full)
    manager.save(2, state)
    assert manager._pending is not None
    manager._pending.exception()  # it has ended
    calls = {
        "poll": manager.poll,
        "wait": manager.wait,
        "close": manager.close,
        "save": lambda: manager.save(3, state),
    }
    with pytest.raises(CheckpointError, match="No space left on device"):
        calls[where]()
    check_last_good(tmp_path, wanted)
    calls["poll"]()  # said once
    manager.close()


def test_ctrl_c_during_a_save_stays_what_it_is(tmp_path: Path, monkeypatch) -> None:
    def interrupted(writer, **results):
        raise KeyboardInterrupt

    state = small_run()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        monkeypatch.setattr(dcp.Writer, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, state)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.path.name == "step-00000001"
