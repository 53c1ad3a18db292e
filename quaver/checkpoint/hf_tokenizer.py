"""A run's tokeniser as the files that Hugging Face reads: tokenizer.json and tokenizer_config.json.

A tokenizer.json goes out byte for byte as it came. The byte tokeniser has none, but the `tokenizers` library can
express it exactly: a byte-level alphabet whose symbol for byte b has the id b, no merges, four special tokens.
May import: data, errors, tokenizers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quaver.data import ByteTokenizer, LibraryTokenizer, load_tokenizer
from quaver.errors import ConfigError

logger = logging.getLogger(__name__)

_BYTE_EOS = "<|eos|>"
# fields of a tokenizer_config.json that point at code or at places of another machine
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "vocab_file", "merges_file")


@dataclass(frozen=True)
class TokenizerDefinition:
    """What is written for a tokeniser.

    Attributes:
        name: what reports call it.
        definition: the text of the tokenizer.json.
        eos_token: the token that ends a document; `eos_id` is its id.
        vocab_size: one more than the greatest id.
        config: fields of its tokenizer_config.json.
    """

    name: str
    definition: str
    eos_token: str
    eos_id: int
    vocab_size: int
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def added_tokens(self) -> int:
        """How many tokens the definition puts around a text unless told not to; training puts none."""
        return int(tokenizers.Tokenizer.from_str(self.definition).num_special_tokens_to_add(False))

    def files(self, max_length: int | None) -> dict[str, bytes]:
        """File name -> content; `max_length` is the model's number of positions."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **({"model_max_length": max_length} if max_length is not None else {}),
            **{key: value for key, value in self.config.items() if key not in _LEFT_OUT},
            "eos_token": self.eos_token,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        return {
            "tokenizer.json": self.definition.encode("utf-8"),
            "tokenizer_config.json": text.encode("utf-8"),
        }


def byte_tokenizer_definition() -> TokenizerDefinition:
    """The byte tokeniser: the same ids for every text, the same text for every list of ids."""
    symbols = _byte_symbols()
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={s: byte for byte, s in symbols.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [
        _BYTE_EOS,
        *(f"<|reserved_{i}|>" for i in range(ByteTokenizer.eos_id + 1, ByteTokenizer.vocab_size)),
    ]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return TokenizerDefinition(
        name=ByteTokenizer.name,
        definition=str(tokenizer.to_str()),
        eos_token=_BYTE_EOS,
        eos_id=ByteTokenizer.eos_id,
        vocab_size=ByteTokenizer.vocab_size,
        config={"split_special_tokens": True},  # in a text "<|eos|>" is seven bytes, as it was in training
    )


def library_tokenizer_definition(
    definition: str, *, name: str, eos_token: str | None = None, config: Mapping[str, Any] | None = None
) -> TokenizerDefinition:
    """A tokeniser by the text of its tokenizer.json.

    Args:
        definition: the text, kept byte for byte.
        name: what reports call it.
        eos_token: the token that ends a document; None looks among well-known names, as training does.
        config: the object in its tokenizer_config.json.

    Raises:
        ConfigError: the text is no tokeniser, or it has no such token.
    """
    opened = LibraryTokenizer(definition, name=name, eos=eos_token, where="tokenizer.json")
    return _described(opened, definition, config)


def read_tokenizer_definition(path: str) -> TokenizerDefinition:
    """A tokeniser from its tokenizer.json, or the folder that holds it, with the tokenizer_config.json beside it.

    Raises:
        ConfigError: as `quaver.data.load_tokenizer`.
    """
    opened = load_tokenizer(path)  # reports every fault of path and files
    file = Path(path).expanduser().absolute()
    file = file / "tokenizer.json" if file.is_dir() else file
    beside = file.with_name("tokenizer_config.json")
    try:
        definition = file.read_text(encoding="utf-8")
        config = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the tokenizer's files cannot be read: {error}", where=path) from error
    return _described(opened, definition, config if isinstance(config, dict) else None)


def _described(
    opened: LibraryTokenizer, definition: str, config: Mapping[str, Any] | None
) -> TokenizerDefinition:
    for key in _LEFT_OUT:
        if config and config.get(key) is not None:
            logger.info("the tokenizer's %s is not written: it belongs to where it came from", key)
    eos = tokenizers.Tokenizer.from_str(definition).id_to_token(opened.eos_id)
    assert eos is not None  # the id came from this very definition
    return TokenizerDefinition(
        opened.name, definition, eos, opened.eos_id, opened.vocab_size, dict(config or {})
    )


def _byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that byte-level tokenisers write it as.

    GPT-2's table (openai/gpt-2, src/encoder.py, bytes_to_unicode): printable Latin-1 characters stand for
    themselves, the other bytes, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, moved = {}, 0
    for byte in range(256):
        symbols[byte] = chr(byte if byte in printable else 0x100 + moved)
        moved += byte not in printable
    if set(symbols.values()) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise ConfigError(
            "the tokenizers library writes bytes by another table than GPT-2's",
            where=f"tokenizers {tokenizers.__version__}",
            remedy="install a version that Quaver supports",
        )
    return symbols
