"""Every fault of a folder is an error that names the key, what is there and what is wanted; nothing is run."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path

import hf_micro as micro
import pytest
import torch
from safetensors.torch import save_file

from quaver.checkpoint.hf_import import HFSource
from quaver.checkpoint.hf_load import check_source, load_into
from quaver.errors import CheckpointError, QuaverError
from quaver.models import build_on_meta

GATE1, UP0, DOWN3 = (
    micro.GATE.format(1),
    micro.GATE.format(0).replace("gate_proj", "up_proj"),
    micro.GATE.format(3).replace("gate_proj", "down_proj"),
)
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return micro.state(micro.model())


@pytest.fixture(scope="module")
def net():
    return build_on_meta(micro.config())


def refuses(net, folder: Path, *parts: str) -> None:
    """Both the check before the build and the load itself refuse, with all `parts` in the message."""
    for attempt in (check_source, load_into):
        with pytest.raises(CheckpointError) as caught:
            attempt(net, HFSource(folder))
        for part in parts:
            assert part in str(caught.value)
        assert caught.value.exit_code == 2
    assert all(tensor.is_meta for tensor in net.state_dict().values())


def without(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    assert key in tensors
    return {name: tensor for name, tensor in tensors.items() if name != key}


def test_missing(net, tensors, tmp_path: Path) -> None:
    refuses(net, micro.write(tmp_path / "1", without(tensors, NORM)), f"needs {NORM},")
    refuses(net, micro.write(tmp_path / "2", without(tensors, micro.FUSED)), f"needs {micro.FUSED},")
    one_less = without(micro.per_expert(tensors), GATE1)
    refuses(
        net, micro.write(tmp_path / "3", one_less), f"needs {GATE1} (48, 64)", f"{micro.FUSED} (4, 96, 64)"
    )


def test_extra(net, tensors, tmp_path: Path) -> None:
    extra = {"model.layers.1.mlp.gate.scale": torch.zeros(1)}
    refuses(net, micro.write(tmp_path / "1", tensors | extra), "hold model.layers.1.mlp.gate.scale,")
    refuses(
        net, micro.write(tmp_path / "2", tensors | {GATE1: torch.zeros(48, 64)}), f"hold {GATE1},", "one set"
    )


@pytest.mark.parametrize("key", [NORM, micro.FUSED, GATE1, DOWN3])
def test_misshaped(net, tensors, tmp_path: Path, key: str) -> None:
    layout = tensors if key in tensors else micro.per_expert(tensors)
    for number, wrong in enumerate((layout[key][:-1], layout[key][None])):
        folder = micro.write(tmp_path / str(number), layout | {key: wrong})
        got, want = tuple(wrong.shape), tuple(layout[key].shape)
        refuses(net, folder, f"shape {got}, wanted {want}", key)


@pytest.mark.parametrize("key", [NORM, micro.FUSED, UP0])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int32, "I32"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")],
)
def test_other_dtypes(net, tensors, tmp_path: Path, key: str, dtype: torch.dtype, name: str) -> None:
    layout = tensors if key in tensors else micro.per_expert(tensors)
    folder = micro.write(tmp_path, layout | {key: layout[key].to(dtype)})
    refuses(
        net, folder, f"the tensor is {name} of shape {tuple(layout[key].shape)}, wanted BF16, F16 or F32", key
    )


def test_expert_out_of_range(net, tensors, tmp_path: Path) -> None:
    key = micro.GATE.format(4)
    folder = micro.write(tmp_path, micro.per_expert(tensors) | {key: torch.zeros(48, 64)})
    refuses(net, folder, "expert 4 is out of range: the model has 4 experts, 0 to 3", key)


def test_a_leading_zero_is_no_second_name_of_an_expert(net, tensors, tmp_path: Path) -> None:
    key = micro.GATE.format("01")
    folder = micro.write(tmp_path, micro.per_expert(tensors) | {key: torch.zeros(48, 64)})
    refuses(net, folder, f"hold {key},")


def test_odd_halves(tmp_path: Path) -> None:
    """A fused tensor with an odd number of rows has no two halves, in either direction."""
    fused = "mlp.experts.gate_up_proj"
    single = {"mlp.experts.0.gate_proj.weight": (2, 3), "mlp.experts.0.up_proj.weight": (3, 3)}
    source = HFSource(micro.write(tmp_path / "1", {fused: torch.zeros(1, 5, 3)}))
    with pytest.raises(CheckpointError, match=r"it is odd \(5\)(.|\n)*gate_up_proj \(1, 5, 3\)"):
        source.check(single)
    source = HFSource(
        micro.write(tmp_path / "2", {name: torch.zeros(shape) for name, shape in single.items()})
    )
    with pytest.raises(CheckpointError, match=r"it is odd \(5\)(.|\n)*gate_up_proj \(1, 5, 3\)"):
        source.check({fused: (1, 5, 3)})


def test_a_fused_file_with_more_experts_than_the_model_asks_for(tmp_path: Path) -> None:
    source = HFSource(micro.write(tmp_path, {"mlp.experts.down_proj": torch.zeros(3, 4, 2)}))
    shapes = {f"mlp.experts.{e}.down_proj.weight": (4, 2) for e in range(2)}
    with pytest.raises(
        CheckpointError, match=r"only 2 of the tensor's 3 matrices(.|\n)*down_proj \(3, 4, 2\)"
    ):
        source.check(shapes)
    assert len(dict(source.tensors_for(shapes))) == 2
    with pytest.raises(CheckpointError, match="only 2 of the tensor's 3 matrices"):
        source.finish()


def test_experts_that_lie_in_another_way_are_not_put_together(tmp_path: Path) -> None:
    source = HFSource(micro.write(tmp_path, {"experts.0.down_proj.weight": torch.zeros(2, 2)}))
    source.check({"experts.down_proj": (1, 2, 2)})
    with pytest.raises(CheckpointError, match=r"needs experts\.down_proj"):
        source.check({"experts.down_proj": (1, 2, 2)}, whole=frozenset({"experts.down_proj"}))


# the folder itself -------------------------------------------------------------------------------------------


def opening_fails(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        HFSource(folder)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../secret.safetensors",
        "..\\secret.safetensors",
        "",
        "\0",
    ],
)
def test_an_index_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    micro.write_index(folder, {"a": name})
    opening_fails(folder, r"leads out of the model's folder\n.*named by model\.safetensors\.index\.json")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"]
)
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    torch.save({"a": torch.zeros(1)}, secret) if name.endswith("bin") else save_file(
        {"a": torch.zeros(1)}, secret
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).symlink_to("../secret")
    opening_fails(folder, "leads out of the model's folder, through a symbolic link")


def test_a_linked_folder_index_and_config_are_refused_too(tmp_path: Path, tensors) -> None:
    outside = micro.write_shards(tmp_path / "outside", {"x.safetensors": tensors})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sub").symlink_to(outside)
    micro.write_index(folder, dict.fromkeys(tensors, "sub/x.safetensors"))
    opening_fails(folder, "through a symbolic link")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").symlink_to(outside / "model.safetensors.index.json")
    opening_fails(folder, "through a symbolic link")
    (folder / "model.safetensors.index.json").unlink()
    micro.write(folder, tensors)
    (tmp_path / "config.json").write_text(micro.config().to_json_string())
    (folder / "config.json").symlink_to("../config.json")
    opening_fails(folder, "through a symbolic link")


def test_links_within_the_folder_and_folders_that_are_links_are_fine(tmp_path: Path, tensors, net) -> None:
    folder = micro.write(tmp_path / "model", tensors)
    (folder / "model.safetensors").rename(folder / "data")
    (folder / "model.safetensors").symlink_to("data")
    (tmp_path / "link").symlink_to(folder)
    check_source(net, HFSource(tmp_path / "link"))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    opening_fails(tmp_path, "no regular file")


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    shards = {
        "x.safetensors": {"a": torch.zeros(1), "c": torch.zeros(1)},
        "y.safetensors": {"a": torch.ones(1), "b": torch.ones(1)},
    }
    folder = micro.write_shards(tmp_path, shards)
    opening_fails(folder, r"two files, x\.safetensors and y\.safetensors\n.*a in ")
    (folder / "model.safetensors.index.json").unlink()
    opening_fails(folder, r"two files, x\.safetensors and y\.safetensors\n.*a in ")


def test_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    shards = {"x.safetensors": {"a": torch.zeros(1)}, "y.safetensors": {"b": torch.ones(1)}}
    folder = micro.write_shards(tmp_path, shards)
    micro.write_index(folder, {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"})
    opening_fails(folder, r"places a key in y\.safetensors, which does not hold it\n.*c in ")
    micro.write_index(folder, {"a": "y.safetensors", "b": "x.safetensors"})
    opening_fails(folder, r"x\.safetensors holds a key that .* places in y\.safetensors\n.*a in ")
    micro.write_index(folder, {"a": "x.safetensors", "c": "y.safetensors"})
    opening_fails(folder, r"y\.safetensors holds a key that .* places in no file\n.*b in ")
    micro.write_index(folder, {"a": "x.safetensors", "b": "z.safetensors"})
    opening_fails(folder, r"the file is not there(.|\n)*z\.safetensors")
    micro.write_index(folder, {"a": 3})
    opening_fails(folder, "names 3, which is no file name")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    opening_fails(tmp_path, "read as JSON|JSON object|no weight_map")


def test_an_index_that_names_a_key_twice(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    text = '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    opening_fails(tmp_path, "the key 'a' stands twice")


def test_a_missing_shard_shows_in_the_file_names(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file({str(number): torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    opening_fails(tmp_path, r"a file is missing: model-00002-of-00003\.safetensors")


def test_damaged_files(tmp_path: Path, tensors) -> None:
    file = micro.write(tmp_path, tensors) / "model.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-1], whole + b"\0", whole[:100], b"", b"\xff" * 64):
        file.write_bytes(broken)
        opening_fails(tmp_path, r"no intact safetensors file(.|\n)*model\.safetensors")


def test_no_weights_and_two_sets_of_weights(tmp_path: Path, tensors) -> None:
    opening_fails(tmp_path / "nowhere", "there is no such folder")
    opening_fails(tmp_path, "holds no model.safetensors")
    micro.write_shards(tmp_path, {"x.safetensors": {"a": torch.zeros(1)}})
    micro.write(tmp_path, tensors)
    opening_fails(tmp_path, "two sets of weights")


def test_files_that_are_not_read_are_told(tmp_path: Path, tensors, net) -> None:
    folder = micro.write(tmp_path, tensors)
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")
    report = load_into(build_on_meta(micro.config()), HFSource(folder))
    assert report.unused_files == dict.fromkeys(
        ("consolidated.safetensors", "pytorch_model.bin"), "model.safetensors is read"
    )
    json.dumps(report.as_json())


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("exploited",)


@pytest.mark.parametrize("old_format", [True, False])
def test_code_in_a_pytorch_file_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_format: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"a": Exploit()}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format
    )
    opening_fails(tmp_path, "cannot be read as tensors alone")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Exploit()))
    opening_fails(tmp_path, "cannot be read as tensors alone")
    assert not (tmp_path / "exploited").exists()


@pytest.mark.parametrize(
    "content", [[torch.zeros(1)], {"a": 1}, {1: torch.zeros(1)}, {"a": torch.zeros(2, 2).to_sparse()}]
)
def test_a_pytorch_file_of_other_things(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    opening_fails(tmp_path, "no mapping|stands where a dense tensor should")


def test_code_that_a_config_points_at_is_not_imported(tmp_path: Path, tensors, monkeypatch) -> None:
    folder = micro.write(tmp_path / "model", tensors)
    values = json.loads(micro.config().to_json_string()) | {"auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    HFSource(folder)
    assert not (tmp_path / "ran").exists()


def test_a_broken_config_is_an_error_of_ours(tmp_path: Path, tensors) -> None:
    folder = micro.write(tmp_path, tensors)
    (folder / "config.json").write_text("{")
    with pytest.raises(QuaverError, match="cannot be read as JSON"):
        HFSource(folder)


def test_integers_in_a_pytorch_file(tmp_path: Path, tensors, net) -> None:
    buffer = io.BytesIO()
    torch.save(tensors | {NORM: tensors[NORM].long()}, buffer)
    (tmp_path / "pytorch_model.bin").write_bytes(buffer.getvalue())
    refuses(net, tmp_path, "the tensor is torch.int64 of shape (64,), wanted BF16, F16 or F32", NORM)
