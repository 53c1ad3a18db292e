import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quaver.data import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer, prepare_data
from quaver.data.bpe import open_bpe, train_bpe
from quaver.data.tokenizer import bytes_between
from quaver.errors import ConfigError

SAMPLE = ["def f(x):\n    return x + 1\n", "Ünïcödé 你好 😀 words words words", "the theatre there then"] * 20


def metaspace() -> tokenizers.Tokenizer:
    """As SentencePiece models are: blanks become a letter, unknown characters an unknown token."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def word_pieces() -> tokenizers.Tokenizer:
    """As BERT's: lower-cased, accents stripped, blanks dropped."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[EOS]"], show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


def trimmed_bytes() -> tokenizers.Tokenizer:
    """As GPT-2's, with offsets that leave out blanks, and special tokens put around every text."""
    tokenizer = tokenizers.Tokenizer.from_str(train_bpe(iter(SAMPLE), 400))
    around = processors.TemplateProcessing(single="<|eos|> $A <|eos|>", special_tokens=[("<|eos|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    return tokenizer


MAKERS = {"metaspace": metaspace, "word pieces": word_pieces, "trimmed bytes": trimmed_bytes}
MADE: dict[str, Tokenizer] = {
    **{
        name: LibraryTokenizer(make().to_str(), name=name, eos=None, where="test")
        for name, make in MAKERS.items()
    },
    "byte": ByteTokenizer(),
}


@pytest.mark.parametrize("kind", MADE)
@given(texts=st.lists(st.text(max_size=40) | st.sampled_from(SAMPLE), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_bytes_of_the_tokens_never_exceed_the_text_and_ids_are_the_same_without_counting(
    kind: str, texts: list[str]
) -> None:
    tokenizer = MADE[kind]
    counted = tokenizer.encode_counting_bytes(texts)
    plain = tokenizer.encode_documents(texts)
    for text, (ids, counts), alone in zip(texts, counted, plain, strict=True):
        assert ids.tolist() == alone.tolist() == tokenizer.encode(text)
        assert len(counts) == len(ids)
        assert int(counts.sum()) <= len(text.encode())
        if kind in ("byte", "trimmed bytes"):
            assert int(counts.sum()) == len(text.encode())


@pytest.mark.parametrize("kind", ["byte", "trimmed bytes"])
@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = MADE[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_counts_equal_the_vocabulary_for_a_byte_level_tokenizer() -> None:
    tokenizer = MADE["trimmed bytes"]
    vocabulary = {i: token for token, i in trimmed_bytes().get_vocab().items()}
    text = " def theatre(x):\n\n\n    return  words \n"
    ((ids, counts),) = tokenizer.encode_counting_bytes([text])
    # each character of a byte-level token is one byte
    assert counts.tolist() == [len(vocabulary[i]) for i in ids.tolist()]


def test_bytes_count_with_the_first_token_that_reaches_them() -> None:
    assert bytes_between("aé你😀", [1, 2, 3, 4]).tolist() == [1, 2, 3, 4]
    assert bytes_between("aé你😀", [2, 2, 1, 4]).tolist() == [3, 0, 0, 7]
    assert bytes_between("", []).tolist() == []


def test_bytes_dropped_between_words_count_with_the_next_token() -> None:
    ((ids, counts),) = MADE["word pieces"].encode_counting_bytes(["the   thé  "])
    assert counts.tolist() == [3, 7]
    assert len(ids) == 2


def test_the_byte_tokenizer_knows_bytes_and_its_four_special_ids() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (260, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 256, 0xC3, 0xA9, 259, 98]) == "aéb"
    assert tokenizer.decode([0xC3, 97, 260, 98, 100000]) == "�a�b�"
    assert [ids.tolist() for ids in tokenizer.encode_documents(["", "é"])] == [[], [0xC3, 0xA9]]


def test_a_lone_surrogate_is_a_named_error() -> None:
    for tokenizer in MADE.values():
        with pytest.raises(ConfigError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800")


def test_special_tokens_in_a_text_are_plain_text() -> None:
    tokenizer = MADE["trimmed bytes"]
    ids = tokenizer.encode("a<|eos|>b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a<|eos|>b"


def test_saved_truncation_padding_and_surrounding_tokens_are_off() -> None:
    ids = MADE["trimmed bytes"].encode("many different words here, all of them")
    assert len(ids) > 3
    assert 0 not in ids


def save(folder: Path, tokenizer: tokenizers.Tokenizer, config: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config", [{"eos_token": "words"}, {"eos_token": {"content": "words", "lstrip": False}}]
)
def test_the_end_of_document_is_what_the_config_beside_it_names(tmp_path: Path, config: dict) -> None:
    plain = trimmed_bytes()
    plain.add_tokens(["words"])
    folder = save(tmp_path / "mine", plain, config)
    for path in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert loaded.eos_id == plain.token_to_id("words")
        assert loaded.name == "mine"
        assert loaded.vocab_size == plain.get_vocab_size()


def test_the_digest_follows_the_definition_and_the_end_of_document(tmp_path: Path) -> None:
    first = save(tmp_path / "a", trimmed_bytes())
    same = save(tmp_path / "b", trimmed_bytes())
    other_eos = save(tmp_path / "c", trimmed_bytes(), {"eos_token": "t"})
    other_file = save(tmp_path / "d", metaspace())
    digests = [load_tokenizer(str(path)).digest for path in (first, same, other_eos, other_file)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_vocabulary_counts_up_to_the_greatest_id(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[EOS]": 1, "a": 90}
    sparse = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    assert load_tokenizer(str(save(tmp_path / "t", sparse))).vocab_size == 91


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, "names no token that ends a document"),
        ({"eos_token": "<none>"}, "no token '<none>', which its config names"),
        ({"eos_token": 3}, "eos_token in"),
    ],
)
def test_no_end_of_document_is_an_error(tmp_path: Path, config: object, wanted: str) -> None:
    nameless = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match=wanted) as caught:
        load_tokenizer(str(save(tmp_path / "t", nameless, config)))
    assert "data.tokenizer" in str(caught.value)


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        load_tokenizer("gpt2-xyz")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    for content in ("", "{", "{}", '{"model": {"type": "Nonsense"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
            load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="files cannot be read"):
        load_tokenizer(str(tmp_path))


def test_a_word_without_an_id_is_an_error_not_a_gap(tmp_path: Path) -> None:
    strict = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    with pytest.raises(ConfigError, match="cannot encode"):
        load_tokenizer(str(save(tmp_path / "t", strict))).encode("b")


def test_a_vocabulary_larger_than_the_models_names_both_numbers(
    config: Callable, folder: Path, tmp_path: Path
) -> None:
    path = save(tmp_path / "t", trimmed_bytes())
    size = load_tokenizer(str(path)).vocab_size
    for settings_, ids in (
        ({"tokenizer": str(path)}, size),
        ({"tokenizer": "bpe", "bpe_vocab_size": 999}, 999),
    ):
        with pytest.raises(ConfigError, match=rf"{ids} ids, but the model's vocabulary only 100"):
            prepare_data(config(folder, **settings_), seed=1, vocab_size=100)
    assert (
        prepare_data(config(folder, tokenizer=str(path)), seed=1, vocab_size=size).tokenizer.vocab_size
        == size
    )


def test_a_library_tokenizer_makes_the_cache_with_exact_bytes(
    config: Callable, folder: Path, tmp_path: Path
) -> None:
    for maker in (metaspace, word_pieces):
        path = save(tmp_path / maker.__name__, maker())
        prepared = prepare_data(config(folder, tokenizer=str(path), validation_fraction=0.4), seed=1)
        (stream,) = prepared.validation.streams
        (source,) = prepared.manifest["sources"]
        assert int(stream.byte_counts.sum()) == source["bytes"]["validation"]
        assert prepared.bytes_per_token_validation == source["bytes"]["validation"] / len(stream.tokens)
        assert (stream.tokens[stream.offsets[1:] - 1] == prepared.tokenizer.eos_id).all()


def test_the_bpe_learns_from_training_documents_alone(config: Callable, tmp_path: Path) -> None:
    lines = [f"common words {i}" for i in range(60)]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    settings_ = {"tokenizer": "bpe", "bpe_vocab_size": 400, "seq_len": 4, "validation_fraction": 0.3}
    prepared = prepare_data(config(file, **settings_), seed=1)
    train, validation = prepared.train.streams[0], prepared.validation.streams[0]
    texts = [
        prepared.tokenizer.decode(train.tokens[a:b].tolist())
        for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True)
    ]
    assert 30 < len(texts) < 60
    assert len(texts) + len(validation.offsets) - 1 == 60
    assert set(texts) < set(lines)
    assert prepared.tokenizer.digest == open_bpe(train_bpe(iter(texts), 400)).digest
    assert prepared.tokenizer.digest != open_bpe(train_bpe(iter(lines), 400)).digest


def test_a_bpe_that_cannot_hold_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold the 256 bytes"):
        train_bpe(iter(SAMPLE), 256)
    smallest = open_bpe(train_bpe(iter(SAMPLE), 257))
    assert smallest.vocab_size == 257
    assert smallest.decode(smallest.encode("你好 a")) == "你好 a"


def test_the_bpe_is_the_same_in_another_process_with_another_number_of_threads() -> None:
    here = open_bpe(train_bpe(iter(SAMPLE), 350)).digest
    code = (
        "from quaver.data.bpe import train_bpe, open_bpe; import json, sys;"
        "print(open_bpe(train_bpe(iter(json.load(sys.stdin)), 350)).digest)"
    )
    for threads, hash_seed in (("1", "7"), ("4", "8")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed}
        there = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(SAMPLE),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.strip() == here


def test_counts_are_unsigned_and_wide() -> None:
    ((_, counts),) = MADE["word pieces"].encode_counting_bytes([" " * 70_000 + "the"])
    assert counts.dtype == np.uint32
    assert counts.tolist() == [70_003]
