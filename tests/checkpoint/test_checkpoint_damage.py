"""A checkpoint that is cut, changed, or was never finished is never a start; the one before it is, and it is said."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import differing, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, find_latest, load, locate, verify
from quaver.errors import CheckpointError

FILES = [".metadata", "__0_0.distcp", "index.json", "manifest.json", "rank-00000.json", "state.json"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints of steps 1 and 2."""
    folder, state = tmp_path_factory.mktemp("run") / "checkpoints", small_run()
    with CheckpointManager(folder) as manager:
        for step in (1, 2):
            train_steps(state, 1)
            manager.save(step, state)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def flip(path: Path, position: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bit
    path.write_bytes(data)


def test_the_newest_whole_one_is_found(folder: Path) -> None:
    found = find_latest(folder)
    assert found is not None
    assert (found.path.name, found.skipped, found.manifest.step) == ("step-00000002", (), 2)
    assert sorted(found.manifest.files) == [name for name in FILES if name != "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "longer", "a link"])
def test_any_damage_to_any_file_is_found(folder: Path, tmp_path: Path, name: str, how: str) -> None:
    path = folder / "step-00000002" / name
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        flip(path, len(data) // 2)
    elif how == "missing":
        path.unlink()
    elif how == "longer":
        path.write_bytes(data + b"\n")
    else:
        shutil.move(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        if name == "manifest.json":
            return  # the manifest vouches for itself wherever it lies
    other = small_run(seed=4)
    before = tensors(other)
    with pytest.raises(CheckpointError) as caught:
        load(path.parent, other)
    assert caught.value.exit_code == 2
    assert name == "manifest.json" or name in str(caught.value)
    assert differing(before, tensors(other)) == []
    found = find_latest(folder)
    assert found is not None
    assert found.path.name == "step-00000001"
    ((skipped, reason),) = found.skipped
    assert skipped == path.parent
    words = {"truncated": "bytes instead of", "longer": "bytes instead of", "missing": "missing"}
    words |= {"flipped": "was changed", "a link": "is not a regular file"}
    if name != "manifest.json":
        assert name in reason
        assert words[how] in reason


def test_every_byte_of_a_manifest_matters(folder: Path) -> None:
    path = folder / "step-00000002" / "manifest.json"
    data = path.read_bytes()
    for position in range(0, len(data), 13):
        flip(path, position)
        with pytest.raises(CheckpointError):
            verify(path.parent)
        path.write_bytes(data)
    verify(path.parent)


def test_flipped_bits_all_over_the_tensors_are_found(folder: Path) -> None:
    path = folder / "step-00000002" / "__0_0.distcp"
    data = path.read_bytes()
    for position in range(0, len(data), len(data) // 50):
        flip(path, position, 0x40)
        with pytest.raises(CheckpointError, match="SHA-256"):
            verify(path.parent)
        path.write_bytes(data)


def test_all_broken_says_why_of_each_and_ends_with_2(folder: Path) -> None:
    flip(folder / "step-00000001" / "state.json", 3)
    (folder / "step-00000002" / "manifest.json").unlink()
    reasons = r"step-00000002: there is no manifest(.|\n)*step-00000001: state.json"
    with pytest.raises(CheckpointError, match=reasons) as caught:
        find_latest(folder)
    assert caught.value.exit_code == 2


def test_a_checkpoint_under_another_name_is_not_taken(folder: Path) -> None:
    (folder / "step-00000002").rename(folder / "step-00000900")
    found = find_latest(folder)
    assert found is not None
    assert found.path.name == "step-00000001"
    assert "step 2" in found.skipped[1][1]


def test_latest_that_points_nowhere_is_told_and_not_followed(folder: Path) -> None:
    (folder / "latest").write_text("../../etc\n")
    found = find_latest(folder)
    assert found is not None
    assert found.path.name == "step-00000002"
    assert found.skipped == ((folder / "latest", "it points to '../../etc', which is not there"),)
    for step in (1, 2):
        shutil.rmtree(folder / f"step-0000000{step}")
    with pytest.raises(CheckpointError, match="no checkpoint is usable: latest") as caught:
        find_latest(folder)
    assert caught.value.exit_code == 2


def test_nothing_saved_is_no_error(tmp_path: Path, original: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    (tmp_path / "step-00000005.tmp-00c0ffee").mkdir()
    assert find_latest(tmp_path) is None


def test_unfinished_saves_are_told(folder: Path) -> None:
    shutil.copytree(folder / "step-00000002", folder / "step-00000003.tmp-00c0ffee")
    found = find_latest(folder)
    assert found is not None
    assert found.path.name == "step-00000002"
    assert [path.name for path, _ in found.skipped] == ["step-00000003.tmp-00c0ffee"]


def test_load_from_takes_a_run_its_checkpoints_or_one_of_them(folder: Path, tmp_path: Path) -> None:
    assert locate(tmp_path).path == folder / "step-00000002"
    assert locate(folder).path == folder / "step-00000002"
    assert locate(folder / "step-00000001").path == folder / "step-00000001"
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="there is no checkpoint") as caught:
            locate(wrong)
        assert caught.value.exit_code == 2
    flip(folder / "step-00000001" / "__0_0.distcp", 999)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp was changed"):
        locate(folder / "step-00000001")


def test_of_another_version_is_named(folder: Path) -> None:
    path = folder / "step-00000002" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="format version 2"):
        verify(path.parent)


def test_a_torch_that_dies_while_reading_leaves_a_named_error(folder: Path, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error", "disk")

    monkeypatch.setattr(torch, "load", broken)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        load(folder / "step-00000002", small_run())
    assert caught.value.exit_code == 2
