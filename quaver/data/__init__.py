"""Corpus, tokenisers, packing and loader: from files of text to batches of token ids.

Read in this order: `sources` (which files), `documents` (their texts), `split` (train or validation),
`tokenizer` and `bpe`, `build` and `cache` (the token cache), `prepare` (all of it), `interleave`, `shuffle`,
`loader`.
"""

from quaver.data.cache import TokenCache, TokenStream
from quaver.data.loader import Batch, Loader, validation_batches
from quaver.data.prepare import PreparedData, check_data, prepare_data
from quaver.data.sources import DEFAULT_CORPUS
from quaver.data.tokenizer import ByteTokenizer, LibraryTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "prepare_data", "PreparedData", "check_data", "TokenCache", "TokenStream", "DEFAULT_CORPUS",
    "Loader", "Batch", "validation_batches",
    "Tokenizer", "ByteTokenizer", "LibraryTokenizer", "load_tokenizer",
]  # fmt: skip
