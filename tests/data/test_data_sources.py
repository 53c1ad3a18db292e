"""Which files are read, and every way in which a source can be unusable: one clear error each."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from quaver.config import SourceConfig
from quaver.data import prepare_data
from quaver.data.documents import read_documents
from quaver.data.prepare import check_data
from quaver.data.sources import find_sources
from quaver.errors import ConfigError


def documents(path: Path) -> list[str]:
    (source,) = find_sources((SourceConfig(path=str(path)),))
    return [text for file in source.files for text in read_documents(file)]


def write_parquet(path: Path, values: object, name: str = "text", **options: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(values)), name: values}), path, **options)


def test_each_kind_of_file_gives_its_documents_unchanged(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\té\n".encode())
    (tmp_path / "b.JSONL").write_text(
        '{"text": "x\\n你", "id": 1}\n"bare"\n\n{"text": "last"}', encoding="utf-8"
    )
    rows = [f"row {i} 😀" for i in range(5000)]
    write_parquet(tmp_path / "c.parquet", rows, row_group_size=700)
    assert documents(tmp_path) == ["one\r\ntwo\té\n", "x\n你", "bare", "last", *rows]


@pytest.mark.parametrize(
    "kind",
    [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())],
    ids=str,
)
def test_parquet_strings_of_every_arrow_type(tmp_path: Path, kind: pyarrow.DataType) -> None:
    write_parquet(tmp_path / "c.parquet", pyarrow.array(["a", "b", "a"]).cast(kind))
    assert documents(tmp_path / "c.parquet") == ["a", "b", "a"]


def test_a_folder_is_read_through_in_sorted_order_and_lists_what_it_leaves_out(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a/x/3.txt", ".git/4.txt", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".hidden.txt").write_text("h")
    (tmp_path / "again.txt").symlink_to(tmp_path / "b" / "1.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (source,) = find_sources((SourceConfig(path=str(tmp_path)),))
    assert [file.relative for file in source.files] == ["B.txt", "a/x/3.txt", "b/1.txt", "b/2.txt"]
    assert [(left.path, left.reason) for left in source.left_out] == [
        (".git", "a hidden name"),
        (".hidden.txt", "a hidden name"),
        ("again.txt", "a link to b/1.txt"),
        ("loop", "a link to ."),
    ]


def test_names_and_weights(tmp_path: Path) -> None:
    for name in ("books", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name)
    sources = find_sources(
        (
            SourceConfig(path=str(tmp_path / "books"), weight=3.0),
            SourceConfig(path=str(tmp_path / "code" / "x.txt"), name="mine"),
            SourceConfig(path="python-stdlib"),
        )
    )
    assert [(source.name, source.weight) for source in sources] == [
        ("books", 3.0),
        ("mine", 1.0),
        ("python-stdlib", 1.0),
    ]


def bad(name: str, content: bytes, *wanted: str) -> object:
    return pytest.param(name, content, wanted, id=f"{name}: {wanted[0]}")


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        bad("a.txt", b"caf\xe9", "not UTF-8", "byte offset 3", "a.txt", "data.sources[0]"),
        bad("a.txt", b"\xff\xfeh\0i\0", "not UTF-8", "byte offset 0"),
        bad("a.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n', "not UTF-8", "byte offset 25", "a.jsonl:2"),
        bad("a.jsonl", b'"ok"\n{"text": "x"\n', "not JSON", "a.jsonl:2"),
        bad("a.jsonl", b"\xef\xbb\xbf" + b'"ok"\n', "not JSON", "BOM", "a.jsonl:1"),
        bad("a.jsonl", b"[" * 100_000, "not JSON", "a.jsonl:1"),
        bad("a.jsonl", b"9" * 5000, "not JSON", "a.jsonl:1"),
        bad("a.jsonl", b'{"body": "x", "id": 2}\n', 'no field "text"', "its fields: body, id", "a.jsonl:1"),
        bad("a.jsonl", b'"ok"\n{"text": 7}\n', "int, not a string", "a.jsonl:2"),
        bad("a.jsonl", b'{"text": null}\n', "NoneType, not a string", "a.jsonl:1"),
        bad("a.jsonl", b'["text"]\n', "list, not a string", "a.jsonl:1"),
        bad("a.jsonl", b'{"text": "\\ud800"}\n', "lone surrogate", "character 0", "a.jsonl:1"),
        bad("a.parquet", b"PAR1 but no table", "not readable as parquet", "a.parquet"),
        bad("a.parquet", b"", "not readable as parquet", "a.parquet"),
        bad("a.txt", b"", "holds no text", "data.sources[0]"),
        bad("a.jsonl", b'""\n\n', "holds no text"),
        bad("a.txt", b"the only document", "none is left for validation"),
    ],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_that_cannot_be_read_exactly_is_named(
    config: Callable, tmp_path: Path, name: str, content: bytes, wanted: tuple[str, ...], as_folder: bool
) -> None:
    file = tmp_path / "source" / name
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        prepare_data(config(file.parent if as_folder else file), seed=1)
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    for part in wanted:
        assert part in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ({"body": ["x"], "n": [1]}, 'no column "text" (its columns: body, n)'),
        ({"text": [1, 2]}, 'the column "text" holds int64, not strings'),
        ({"text": [b"x"]}, 'the column "text" holds binary, not strings'),
        ({"text": ["a", None]}, "row 1"),
    ],
)
def test_a_parquet_table_without_strings_in_text(tmp_path: Path, table: dict, wanted: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(ConfigError) as caught:
        documents(tmp_path / "a.parquet")
    assert wanted in str(caught.value)
    assert "a.parquet" in str(caught.value)


def test_a_parquet_string_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    # Arrow lets such strings through; a cast without check makes one.
    values = pyarrow.array([b"fine", b"ab\xff"]).view(pyarrow.string())
    write_parquet(tmp_path / "a.parquet", values)
    with pytest.raises(ConfigError, match="byte offset 2") as caught:
        documents(tmp_path / "a.parquet")
    assert "row 1" in str(caught.value)


def refuse(*configs: SourceConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        find_sources(configs)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "given", ["nowhere.txt", "no/such/folder", "a\0b", "x" * 5000, "~no-such-user-here/x"]
)
def test_a_path_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    message = refuse(SourceConfig(path=given))
    assert repr(given) in message
    assert "data.sources[0].path" in message


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert "holds no .txt, .jsonl or .parquet file" in refuse(SourceConfig(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["a.csv", "README", "a.txt.gz", "a.py"])
@pytest.mark.parametrize("as_folder", [False, True])
def test_an_unknown_extension(tmp_path: Path, name: str, as_folder: bool) -> None:
    (tmp_path / "good.txt").write_text("x")
    (tmp_path / name).write_text("x")
    message = refuse(SourceConfig(path=str(tmp_path if as_folder else tmp_path / name)))
    assert "is none of .txt, .jsonl, .parquet" in message
    assert name in message


@pytest.mark.parametrize("target", ["outside.txt", "outside", "missing-outside.txt"])
def test_a_link_that_leaves_the_folder(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    root = tmp_path / "corpus"
    root.mkdir()
    (root / "good.txt").write_text("x")
    (root / "link.txt").symlink_to(tmp_path / target)
    message = refuse(SourceConfig(path=str(root)))
    assert "leaves its source's folder" in message
    assert str(root / "link.txt") in message


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_pipe_is_no_file(tmp_path: Path, as_folder: bool) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    message = refuse(SourceConfig(path=str(tmp_path if as_folder else tmp_path / "pipe.txt")))
    assert "neither a plain file nor a folder" in message


def test_two_sources_of_one_name(tmp_path: Path) -> None:
    for name in ("a/x.txt", "b/x.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    message = refuse(
        SourceConfig(path=str(tmp_path / "a/x.txt")), SourceConfig(path=str(tmp_path / "b/x.txt"))
    )
    assert "two sources have the name 'x'" in message
    assert "data.sources[0] and data.sources[1]" in message


def test_a_dry_check_finds_errors_without_reading_or_writing(
    config: Callable, folder: Path, tmp_path: Path
) -> None:
    check_data(config(folder), vocab_size=260)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="cannot be used: No such file"):
        check_data(config(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="repeat only after"):
        check_data(config((folder, 1234567.0, "a"), (folder, 7654321.0, "b")))
    with pytest.raises(ConfigError, match="260 ids, but the model's vocabulary only 259"):
        check_data(config(folder), vocab_size=259)


def test_a_jsonl_of_many_lines_is_read_line_by_line(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i}"}) for i in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    reader = read_documents(find_sources((SourceConfig(path=str(tmp_path / "a.jsonl")),))[0].files[0])
    assert [next(reader), next(reader)] == ["line 0", "line 1"]
