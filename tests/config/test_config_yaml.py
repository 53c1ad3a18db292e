"""The YAML reader: YAML 1.2 values, duplicate keys, files that are no config, and nothing that runs code."""

import math
import os

import pytest

from quaver.config import load_config, parse_config
from quaver.config.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_yaml
from quaver.errors import ConfigError


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    return str(caught.value)


# known answers: YAML 1.2.2, chapter 10.3 (core schema)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("2.2e-4", 2.2e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5", -0.5),
        ("+1.5", 1.5),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("08", 8),
        ("0o17", 15),
        ("0xfF", 255),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("=", "="),
        ("'1e-5'", "1e-5"),
        ('"null"', "null"),
        ("!!str 5", "5"),
        ("e5", "e5"),
        ("-", [None]),
        ("1e", "1e"),
        ("[a, 1]", ["a", 1]),
        ("!!float 3", 3.0),
    ],
)
def test_values_follow_the_core_schema(text, value):
    data = parse_yaml(f"key: {text}" if text != "-" else "key:\n  -", "run.yaml").data
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


def test_nan_is_a_float():
    assert math.isnan(parse_yaml("key: .nan", "run.yaml").data["key"])


def test_small_learning_rates_are_numbers():
    assert parse_config("optimizer: {lr: 1e-5, eps: 1E-08}").optimizer.lr == 0.00001


def test_off_is_text_where_text_is_wanted():
    config = parse_config("gradient_checkpointing:\n  activation_checkpoint: off\n")
    assert config.gradient_checkpointing.activation_checkpoint == "off"


def test_duplicate_keys_name_both_lines():
    message = refused("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\n")
    assert "2 errors in run.yaml" in message
    assert "run.yaml:5: b.c: duplicate key: lines 3 and 5" in message
    assert "run.yaml:6: a: duplicate key: lines 1 and 6" in message


def test_lines_are_those_of_the_keys():
    document = parse_yaml("# comment\na:\n  - x\n\n  - b: 1\n    c:\n      2\n", "run.yaml")
    assert document.data == {"a": ["x", {"b": 1, "c": 2}]}
    assert document.place(("a",)) == "run.yaml:2"
    assert document.place(("a", 0)) == "run.yaml:3"
    assert document.place(("a", 1, "c")) == "run.yaml:6"
    assert document.place(("a", 1, "unknown")) == "run.yaml:5"
    assert document.place(("unknown",)) == "run.yaml"


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['echo ran > {path}']",
        "!!python/name:os.system ''",
        "!include '{path}'",
        "!!binary aGk=",
        "!!set {{a}}",
        "!!timestamp 2024-01-02",
    ],
)
def test_tags_beyond_plain_data_are_refused_and_run_nothing(tag, tmp_path):
    victim = tmp_path / "ran"
    message = refused(f"a: 1\nname: {tag.format(path=victim)}\n")
    assert message.startswith("run.yaml:2: name: the tag !")
    assert "runs no code" in message
    assert not victim.exists()


def test_a_tag_on_the_whole_document_is_refused(tmp_path):
    victim = tmp_path / "ran"
    assert "is refused" in refused(f"!!python/object/apply:os.system ['echo ran > {victim}']\n")
    assert not victim.exists()


def test_aliases_repeat_plain_data():
    assert parse_yaml("a: &x [1, 2]\nb: *x\n", "f").data == {"a": [1, 2], "b": [1, 2]}


def test_alias_bombs_are_stopped():
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert f"more than {MAX_NODES} values" in refused("\n".join(layers))


def test_a_large_text_behind_many_aliases_is_stopped():
    text = f"a: &x {'y' * (MAX_BYTES // 4)}\nb: [*x, *x, *x, *x, *x]\n"
    assert f"{MAX_BYTES} characters" in refused(text)


def test_an_alias_inside_itself_is_stopped():
    assert f"deeper than {MAX_DEPTH}" in refused("a: &x [*x]\n")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_nesting_is_stopped(opening):
    assert f"run.yaml:1: nested deeper than {MAX_DEPTH} levels" in refused(opening * 100_000)


def test_many_values_are_stopped():
    assert f"more than {MAX_NODES} values" in refused("[" + "1," * (MAX_NODES + 1) + "]")


def test_merge_keys_are_refused():
    assert "merge keys" in refused("a: &x {b: 1}\nc:\n  <<: *x\n")


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5", "[a]", "? {b: 1}\n"])
def test_keys_that_are_not_text_are_refused(key):
    message = refused(f"a: 1\n{key}: 2\n")
    assert message.startswith("run.yaml:2: the key ")
    assert "is not text" in message


@pytest.mark.parametrize(
    "text",
    ["a: !!int x", "a: !!float x", "a: !!bool maybe", 'a: "\\ud800"', '"\\ud800": 1', "a: " + "9" * 5000],
)
def test_values_that_no_config_can_hold_are_refused(text):
    assert "run.yaml:1: " in refused(text)
    assert "is not a valid value" in refused(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1, 2",
        "a: b: c",
        "a:\n\t- b",
        "a: 1\n---\nb: 2",
        "a: *nowhere",
        "a: %",
        "\x00",
        "key: 'open",
        "a: {b: 1",
        "a: \x07",
        'a: "\\UFFFFFFFF"',
        'a: "\\U00110000"',
        "%YAML 1." + "9" * 5000 + "\n--- a",
    ],
)
def test_text_that_is_not_yaml_is_one_clear_error(text):
    message = refused(text)
    assert message.startswith("run.yaml")
    assert "not valid YAML" in message


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "null"])
def test_an_empty_file_is_an_error(text):
    with pytest.raises(ConfigError, match=r"run\.yaml: the config is empty"):
        parse_config(text, source="run.yaml")


@pytest.mark.parametrize(
    ("text", "given"), [("- a\n- b\n", "a list of 2"), ("just text", "the text"), ("3", "the number 3")]
)
def test_a_file_that_is_no_mapping_is_an_error(text, given):
    with pytest.raises(ConfigError, match=f"run.yaml:1: a config is a mapping of keys, got {given}"):
        parse_config(text, source="run.yaml")


def test_a_file_is_loaded_and_named_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "name: a\ndata:\n  sources:\n    - path: ../corpus/über.txt\n", encoding="utf-8"
    )
    config = load_config("run.yaml")
    assert config.data.sources[0].path == "../corpus/über.txt"  # kept as written, not looked at
    assert load_config(tmp_path / "run.yaml") == config
    (tmp_path / "run.yaml").write_text("\nnaem: a\n")
    with pytest.raises(ConfigError, match=r"^run\.yaml:2: naem: unknown key"):
        load_config("run.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\n")
    assert load_config(path).name == "a"


def test_files_that_cannot_be_read_as_a_config(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"name: a\nseed: \xff\n")
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, message in [
        (tmp_path / "missing.yaml", "missing.yaml: no such file"),
        (tmp_path, "is a folder, wanted a YAML file"),
        (bad, "bad.yaml:2: not UTF-8"),
        (big, f"big.yaml: larger than {MAX_BYTES} bytes"),
        (bad / "below.yaml", "below.yaml: cannot be read"),
        ("a\0b", "cannot be read"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert message in str(caught.value)
        assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
