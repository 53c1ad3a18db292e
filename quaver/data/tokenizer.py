"""Tokenisers: text to ids and back, with the bytes that each id stands for.

A tokeniser here is lossy in nothing that a loss could hide: special tokens in a document's text are plain
text (a corpus cannot forge an end of document), saved truncation and padding are off, and bytes per token are
counted so that bits per byte add up to the documents' exact size. Tokeniser files are untrusted data: they
are read by the `tokenizers` library only, never through code that comes with them.
May import `quaver.errors`, numpy and tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from quaver.data.paths import existing_path
from quaver.errors import ConfigError

Ids = npt.NDArray[np.uint32]
ByteCounts = npt.NDArray[np.uint32]

# Names that end a document in the tokenisers of the common model families, tried where no config names one.
_KNOWN_EOS = (
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|eos|>", "[EOS]",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the rest of Quaver knows of a tokeniser."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id; a model's vocabulary must be at least this large."""

    @property
    def eos_id(self) -> int:
        """The id that stands after each document."""

    @property
    def digest(self) -> str:
        """sha256 over all that decides the ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any special token around them."""

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens have none, bytes that are not UTF-8 become U+FFFD."""

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of many documents at once, uint32 [tokens] each."""

    def encode_counting_bytes(self, texts: Sequence[str]) -> list[tuple[Ids, ByteCounts]]:
        """As `encode_documents`, with the UTF-8 bytes of text that each token adds, uint32 [tokens]."""


class ByteTokenizer:
    """The 256 bytes, then four special ids: 256 ends a document, three are free. Needs no training."""

    name = "byte"
    eos_id = 256
    vocab_size = 260
    digest = hashlib.sha256(b"quaver byte tokenizer, version 1: 256 bytes, eos 256, size 260").hexdigest()

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(_utf8(text))

    def decode(self, ids: list[int]) -> str:
        """Special ids have no text; ids past the vocabulary and broken UTF-8 become U+FFFD."""
        kept = bytearray()
        for token in ids:
            if 0 <= token < 256:
                kept.append(token)
            elif not 256 <= token < self.vocab_size:
                kept.append(0xFF)  # never valid in UTF-8, so it shows as U+FFFD
        return kept.decode("utf-8", errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer`."""
        return [np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint32) for text in texts]

    def encode_counting_bytes(self, texts: Sequence[str]) -> list[tuple[Ids, ByteCounts]]:
        """See `Tokenizer`: one byte a token."""
        return [(ids, np.ones_like(ids)) for ids in self.encode_documents(texts)]


class LibraryTokenizer:
    """A tokeniser of the `tokenizers` library: what a tokenizer.json describes.

    Args:
        definition: the text of the tokenizer.json.
        name: what reports call it.
        eos: the token that ends a document; None looks among the special tokens of well-known names.
        where: file and config key, for errors.

    Raises:
        ConfigError: the definition is not readable, or has no such token.
    """

    def __init__(self, definition: str, *, name: str, eos: str | None, where: str) -> None:
        self.name = name
        self.definition = definition
        self._where = where
        try:
            self._library = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ConfigError(
                f"the tokenizer.json cannot be read: {error}",
                where=where,
                remedy="give an intact tokenizer.json",
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        self._library.post_processor = None  # puts special tokens around a text, takes blanks out of offsets
        self._library.encode_special_tokens = True
        self.vocab_size = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id = self._find_eos(eos)
        self.digest = hashlib.sha256(f"{self.eos_id}\n{definition}".encode()).hexdigest()

    @property
    def eos_token(self) -> str:
        """The text of the token that ends a document."""
        return str(self._library.id_to_token(self.eos_id))

    def _find_eos(self, eos: str | None) -> int:
        for token in (eos,) if eos is not None else _KNOWN_EOS:
            found = self._library.token_to_id(token)
            if found is not None:
                return int(found)
        raise ConfigError(
            f"the tokenizer has no token {eos!r}, which its config names as eos_token"
            if eos is not None
            else "the tokenizer names no token that ends a document",
            where=self._where,
            remedy='put a tokenizer_config.json with {"eos_token": "..."} beside the tokenizer.json',
        )

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self.encode_documents([text])[0].tolist()

    def decode(self, ids: list[int]) -> str:
        """Special tokens and ids past the vocabulary have no text."""
        return str(self._library.decode(ids, skip_special_tokens=True))

    def encode_documents(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer`; documents run on the library's threads."""
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in self._encode(texts, offsets=False)]

    def encode_counting_bytes(self, texts: Sequence[str]) -> list[tuple[Ids, ByteCounts]]:
        """See `Tokenizer`; counted from the characters of the original text that each token ends at.

        A character split over several tokens counts with the first of them, text that the tokeniser drops
        (blanks, in some) with the next token; what it drops at the end counts with no token.
        """
        counted = []
        for text, encoding in zip(texts, self._encode(texts, offsets=True), strict=True):
            counts = bytes_between(text, [end for _, end in encoding.offsets])
            counted.append((np.array(encoding.ids, dtype=np.uint32), counts))
        return counted

    def _encode(self, texts: Sequence[str], *, offsets: bool) -> list[tokenizers.Encoding]:
        batch = [_utf8(text).decode("utf-8") for text in texts]
        encode = self._library.encode_batch if offsets else self._library.encode_batch_fast
        try:
            return list(encode(batch, add_special_tokens=False))
        except Exception as error:  # as above: for instance a word with no id and no token for unknown words
            raise ConfigError(
                f"the tokenizer cannot encode the text: {error}",
                where=self._where,
                remedy="take a tokenizer that covers any text, such as a byte-level one",
            ) from error


def load_tokenizer(path: str) -> LibraryTokenizer:
    """Loads a tokenizer.json, given as the file or the folder that holds it.

    The end-of-document token is the `eos_token` of tokenizer_config.json beside it; without that file it is
    looked for among well-known names.

    Raises:
        ConfigError: no such file, not readable, or no token that ends a document.
    """
    where = f"data.tokenizer, {path}"
    remedy = "give 'byte', 'bpe', a tokenizer.json or a folder that holds one"
    file, status = existing_path(path, "data.tokenizer", remedy)
    if stat.S_ISDIR(status.st_mode):
        file = file / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer.json at {path!r}", where=where, remedy=remedy)
    try:
        definition = file.read_text(encoding="utf-8")
        eos = _configured_eos(file.with_name("tokenizer_config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer's files cannot be read: {error}",
            where=where,
            remedy="give intact, readable files",
        ) from error
    return LibraryTokenizer(definition, name=file.parent.name or file.stem, eos=eos, where=where)


def require_vocabulary(tokenizer_size: int, model_size: int | None, name: str) -> None:
    """Raises ConfigError where a tokeniser has more ids than the model embeddings (None: no model yet)."""
    if model_size is not None and tokenizer_size > model_size:
        raise ConfigError(
            f"the tokenizer {name!r} has {tokenizer_size} ids, but the model's vocabulary only {model_size}",
            where="data.tokenizer",
            remedy=f"set the model's vocab_size to at least {tokenizer_size}, or take a smaller tokenizer",
        )


def _configured_eos(file: Path) -> str | None:
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    eos = config.get("eos_token") if isinstance(config, dict) else None
    if isinstance(eos, dict):  # an AddedToken written out: {"content": "</s>", ...}
        eos = eos.get("content")
    if eos is not None and not isinstance(eos, str):
        raise ValueError(f"eos_token in {file} is a {type(eos).__name__}, not a string")
    return eos


def bytes_between(text: str, ends: Sequence[int]) -> ByteCounts:
    """The UTF-8 bytes of `text` up to each of `ends` (in characters) that none before it reached, uint32."""
    furthest = np.maximum.accumulate(np.array(ends, dtype=np.int64))
    return np.diff(_byte_positions(text)[furthest], prepend=0).astype(np.uint32)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text holds a lone surrogate at character {error.start}, which UTF-8 cannot hold",
            remedy="give valid Unicode text",
        ) from error


def _byte_positions(text: str) -> npt.NDArray[np.int64]:
    """The byte offset at which each character starts, and the end: int64 [characters + 1]."""
    if text.isascii():
        return np.arange(len(text) + 1, dtype=np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(widths)])
