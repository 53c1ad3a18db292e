"""Folders of strangers: each is made consistent, digests and all, so that only what it says can give it away."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_runs import differing, small_run, tensors, train_steps

from quaver.checkpoint import CheckpointManager, load
from quaver.checkpoint.manifest import FileEntry, Manifest, describe_files, read_manifest
from quaver.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = small_run()
    train_steps(state, 1)
    with CheckpointManager(tmp_path) as manager:
        return manager.save(1, state)


def sign(folder: Path, **changes) -> None:
    """Makes the manifest fit whatever the folder now holds."""
    old = read_manifest(folder)
    files = describe_files(folder, [p.name for p in folder.iterdir() if p.name != "manifest.json"])
    (folder / "manifest.json").write_bytes(old.model_copy(update={"files": files} | changes).to_bytes())


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_the_bomb_is_real(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "boom")))
    assert (tmp_path / "boom").exists()


def test_a_pickle_in_torchs_metadata_is_never_opened(folder: Path, tmp_path: Path) -> None:
    """The digest gives it away; with a manifest to match, it is still not read."""
    mark = tmp_path / "boom"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load(folder, small_run(seed=4))
    sign(folder)
    other = small_run(seed=4)
    load(folder, other)
    assert not mark.exists()
    reference = small_run()
    assert differing(tensors(other), tensors(reference)) != []
    assert other.optimizer.state[other.model.row]["step"] == 1


def test_pickles_where_tensors_should_be_are_refused(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "boom"
    index = json.loads((folder / "index.json").read_text())
    shards = folder / "__0_0.distcp"
    for kind in ("raw", "zip"):
        if kind == "raw":
            shards.write_bytes(pickle.dumps(Bomb(mark)))
        else:
            torch.save(Bomb(mark), shards)
        for stored in index["tensors"].values():
            for piece in stored["pieces"]:
                piece["start"], piece["length"] = 0, shards.stat().st_size
        (folder / "index.json").write_text(json.dumps(index))
        sign(folder)
        with pytest.raises(CheckpointError, match="could not be read") as caught:
            load(folder, small_run(seed=4))
        assert caught.value.exit_code == 2
        assert not mark.exists()


def test_whole_objects_where_tensors_should_be_are_refused(folder: Path) -> None:
    shards = folder / "__0_0.distcp"
    torch.save({"not": "a tensor"}, shards)
    index = json.loads((folder / "index.json").read_text())
    for stored in index["tensors"].values():
        for piece in stored["pieces"]:
            piece["start"], piece["length"] = 0, shards.stat().st_size
    (folder / "index.json").write_text(json.dumps(index))
    sign(folder)
    with pytest.raises(CheckpointError, match="is not the torch"):
        load(folder, small_run(seed=4))


Edit = Callable[[dict], None]
KEY = "optim.first.weight.master"
EDITS: dict[str, tuple[Edit, str]] = {
    "a file outside": (lambda t: t[KEY]["pieces"][0].update(file="../../secret"), "manifest does not list"),
    "an absolute file": (lambda t: t[KEY]["pieces"][0].update(file="/etc/passwd"), "manifest does not list"),
    "a file not listed": (
        lambda t: t[KEY]["pieces"][0].update(file="manifest.json"),
        "manifest does not list",
    ),
    "beyond the end": (lambda t: t[KEY]["pieces"][0].update(length=10**12), "beyond the end"),
    "no pieces": (lambda t: t[KEY].update(pieces=[]), "0 of 7 rows"),
    "a piece twice": (lambda t: t[KEY]["pieces"].append(t[KEY]["pieces"][0]), "rows from 7 on"),
    "too few rows": (lambda t: t[KEY]["pieces"][0].update(sizes=[6, 6]), "6 of 7 rows"),
    "half the columns": (lambda t: t[KEY]["pieces"][0].update(sizes=[7, 3]), "rows from 0 on"),
    "a gap": (lambda t: t[KEY]["pieces"][0].update(offsets=[1, 0]), "rows from 0 on"),
    "other dimensions": (
        lambda t: t[KEY]["pieces"][0].update(offsets=[0], sizes=[7]),
        "number of dimensions",
    ),
    "another tensor's bytes": (
        lambda t: t[KEY].update(
            pieces=[t["optim.row.master"]["pieces"][0] | {"offsets": [0, 0], "sizes": [7, 6]}]
        ),
        "is not the torch.float32 piece",
    ),
    "another dtype's bytes": (
        lambda t: t[KEY].update(pieces=t["model.first.weight"]["pieces"]),
        "is not the torch.float32 piece",
    ),
    "an unknown dtype": (lambda t: t[KEY].update(dtype="quint8"), "unknown dtype"),
    "negative": (lambda t: t[KEY]["pieces"][0].update(start=-1), "cannot be read"),
    "an extra field": (lambda t: t[KEY].update(transform="zstd"), "cannot be read"),
    "not a number": (lambda t: t[KEY].update(size="7x6"), "cannot be read"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_that_lies_is_refused(folder: Path, edit: str) -> None:
    change, words = EDITS[edit]
    index = json.loads((folder / "index.json").read_text())
    change(index["tensors"])
    (folder / "index.json").write_text(json.dumps(index))
    sign(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(folder, small_run(seed=4))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["index.json", "state.json", "rank-00000.json", "manifest.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b"null", b'{"version": 1}', b'{"version": NaN}']
)
def test_files_that_are_no_such_json_are_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    if name != "manifest.json":
        sign(folder)
    with pytest.raises(CheckpointError) as caught:
        load(folder, small_run(seed=4))
    assert caught.value.exit_code == 2
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"python_words": [1, 2]},
        {"python_version": 2},
        {"python_words": ["a"]},
        {"numpy_words": [1]},
        {"numpy_words": [-1] * 624},
        {"numpy_position": 10**30},
        {"torch_bytes": "AAAA"},
        {"torch_bytes": "?"},
    ],
)
def test_states_that_are_none_of_a_generator_are_refused(folder: Path, change: dict) -> None:
    path = folder / "rank-00000.json"
    record = json.loads(path.read_text())
    record["random"].update(change)
    path.write_text(json.dumps(record))
    sign(folder)
    with pytest.raises(CheckpointError, match=r"rank-00000\.json") as caught:
        load(folder, small_run(seed=4))
    assert caught.value.exit_code == 2


def test_files_that_the_manifest_does_not_list_are_not_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    for name in ("state.json", "index.json", "rank-00000.json"):
        files = {k: v for k, v in manifest.files.items() if k != name}
        (folder / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_bytes())
        with pytest.raises(CheckpointError, match=f"does not list {name}"):
            load(folder, small_run(seed=4))


@pytest.mark.parametrize("name", ["../state.json", "..", "a/b", "/etc/passwd", "manifest.json", "a\nb", ""])
def test_a_manifest_lists_files_of_its_own_folder_only(folder: Path, name: str) -> None:
    entry = FileEntry(size=0, sha256="0" * 64)
    manifest = Manifest.model_construct(
        format="quaver-checkpoint", version=1, step=1, world_size=1, recipe=None, files={name: entry}
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(CheckpointError, match=r"damaged|no file of its folder"):
        load(folder, small_run(seed=4))


def test_what_is_no_file_is_not_waited_for(folder: Path) -> None:
    path = folder / "state.json"
    size = path.stat().st_size
    path.unlink()
    os.mkfifo(path)
    manifest = read_manifest(folder)
    files = manifest.files | {"state.json": FileEntry(size=0, sha256="0" * 64)}
    (folder / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_bytes())
    assert size
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(folder, small_run(seed=4))


def test_a_manifest_and_a_state_of_two_saves_are_refused(folder: Path) -> None:
    sign(folder, step=7)
    shutil.move(folder, folder.with_name("step-00000007"))
    with pytest.raises(CheckpointError, match="two different saves"):
        load(folder.with_name("step-00000007"), small_run(seed=4))
