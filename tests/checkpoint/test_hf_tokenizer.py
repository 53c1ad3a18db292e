"""Exported tokenisers against the ones that trained, both by the tokenizers library and as transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path

import hf_micro as micro
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quaver.checkpoint.hf_export import export_hf
from quaver.checkpoint.hf_tokenizer import (
    byte_tokenizer_definition,
    library_tokenizer_definition,
    read_tokenizer_definition,
)
from quaver.data import ByteTokenizer, LibraryTokenizer
from quaver.data.bpe import EOS, open_bpe, train_bpe
from quaver.errors import ConfigError

BYTES = ByteTokenizer()
TEXTS = [
    "",
    "def f(x):\n\treturn  x\r\n",
    "naïve 数据 🙂\x00\x7f",
    "<|eos|> <|reserved_257|>",
    " a",
    "a  ",
    "ﬁ ½ e\u0301",
]


def exported(tmp_path: Path, definition) -> Path:
    net = micro.model()
    export_hf(net.state_dict().items(), net.config, definition, tmp_path / "out")
    return tmp_path / "out"


def library(definition: str) -> tokenizers.Tokenizer:
    """The definition as the training reads it: special tokens in a text are text."""
    opened = tokenizers.Tokenizer.from_str(definition)
    opened.encode_special_tokens = True
    return opened


BYTE_LIBRARY = library(byte_tokenizer_definition().definition)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_has_the_same_bytes(text: str) -> None:
    assert BYTE_LIBRARY.encode(text).ids == BYTES.encode(text) == list(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 259)))
def test_every_list_of_ids_has_the_same_text(ids: list[int]) -> None:
    assert BYTE_LIBRARY.decode(ids, skip_special_tokens=True) == BYTES.decode(ids)


def test_transformers_reads_the_byte_tokenizer_as_it_trained(tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(exported(tmp_path, byte_tokenizer_definition()))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == BYTES.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == text
    assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (260, 256, 64)


def test_a_trained_bpe_goes_out_byte_for_byte(tmp_path: Path) -> None:
    corpus = "for item in items:\n    print(item, end='')\n" * 20
    definition = train_bpe(iter([corpus]), 260)
    out = exported(tmp_path, library_tokenizer_definition(definition, name="bpe", eos_token=EOS))
    assert (out / "tokenizer.json").read_text(encoding="utf-8") == definition
    theirs, ours = AutoTokenizer.from_pretrained(out), open_bpe(definition)
    for text in (corpus, *TEXTS[:3]):
        assert theirs.encode(text) == ours.encode(text)
    assert theirs.eos_token_id == ours.eos_id
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == ours.eos_id
    # and what was written is what a next run would train with
    assert read_tokenizer_definition(str(out)).eos_id == ours.eos_id


def with_bos(folder: Path, **config: object) -> Path:
    """A tokenizer.json that puts a token before each text, and the config beside it."""
    made = tokenizers.Tokenizer.from_str(train_bpe(iter(["a b a b"]), 257))
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    folder.mkdir()
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS} | config))
    return folder


def test_a_file_of_the_user_keeps_its_fields_but_not_its_code(tmp_path: Path) -> None:
    source = with_bos(
        tmp_path / "in",
        bos_token="<s>",
        chat_template="{{ x }}",
        auto_map={"AutoTokenizer": ["evil.T", None]},
    )
    definition = read_tokenizer_definition(str(source))
    out = exported(tmp_path, definition)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert (written["bos_token"], written["chat_template"], written["eos_token"]) == ("<s>", "{{ x }}", EOS)
    assert "auto_map" not in written
    assert AutoTokenizer.from_pretrained(out).bos_token == "<s>"


def test_tokens_that_training_did_not_see_are_noted(tmp_path: Path) -> None:
    definition = read_tokenizer_definition(str(with_bos(tmp_path / "in") / "tokenizer.json"))
    net = micro.model()
    report = export_hf(net.state_dict().items(), net.config, definition, tmp_path / "out")
    assert len(report.notes) == 1
    assert "1 special token(s) around a text" in report.notes[0]
    ours = LibraryTokenizer(definition.definition, name="x", eos=EOS, where="test")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode("a b") != ours.encode("a b")
    assert theirs.encode("a b", add_special_tokens=False) == ours.encode("a b")


def test_a_definition_without_an_end_is_refused() -> None:
    definition = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()
    with pytest.raises(ConfigError, match="names no token that ends a document"):
        library_tokenizer_definition(definition, name="x")
    with pytest.raises(ConfigError, match=r"the tokenizer\.json cannot be read"):
        library_tokenizer_definition("{", name="x")
