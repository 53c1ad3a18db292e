"""A byte-level BPE, trained at first use on the training documents only and kept by what it was trained on.

Validation text has no part in it, or its loss would be flattered. The same documents and size give the same
tokeniser, whatever the seed, the process and the number of threads.
May import `quaver.errors`, numpy, tokenizers and the tokeniser's module.
"""

from __future__ import annotations

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from quaver.data.tokenizer import LibraryTokenizer
from quaver.errors import ConfigError

EOS = "<|eos|>"
SMALLEST = 257  # the 256 bytes and the end of document


def train_bpe(texts: Iterator[str], vocab_size: int) -> str:
    """Trains on `texts` and returns the tokenizer.json; a small corpus may fill fewer than `vocab_size` ids.

    Raises:
        ConfigError: `vocab_size` is below 257.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(
            f"a byte-level BPE of {vocab_size} ids cannot hold the 256 bytes and the end of document",
            where="data.bpe_vocab_size",
            remedy=f"give at least {SMALLEST}",
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return str(tokenizer.to_str())


def open_bpe(definition: str) -> LibraryTokenizer:
    """The tokeniser that `train_bpe` described."""
    return LibraryTokenizer(definition, name="bpe", eos=EOS, where="data.tokenizer, the trained BPE")
