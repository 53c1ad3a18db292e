"""What the model is trained on (`data`): sources, tokeniser, sequence length and the split."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from quaver.config.base import MANY, Many, Section, Text, supported
from quaver.config.problems import problem


class SourceConfig(Section):
    """One source of text and its share of the training tokens."""

    path: Text = Field(
        description=".txt (one document), .jsonl (one a line) or .parquet (one a row) file, a folder that holds "
        "nothing else, or python-stdlib (the default corpus). Relative paths start at the current folder. A corpus "
        "needs two documents at least: one trains, one validates."
    )
    weight: float = Field(
        1.0, gt=0, description="Share of this source among all, relative to the others' weights."
    )
    name: Text | None = Field(
        None, description="Name in manifest and reports; null means taken from the path."
    )


class DataConfig(Section):
    """Text, tokeniser, sequence length and the split into training and validation."""

    sources: Many[SourceConfig] = Field((), description="Sources of text; none means the default corpus.")
    tokenizer: Text = Field(
        "byte", description="byte, bpe (trained at first use), or the path of a tokenizer.json or its folder."
    )
    bpe_vocab_size: int = Field(
        4096, ge=257, lt=MANY, description="Vocabulary of the bpe tokeniser; others ignore it."
    )
    seq_len: int = Field(256, ge=1, lt=MANY, description="Tokens per sequence.")
    validation_fraction: float = Field(
        0.05, gt=0, lt=1, description="Share of the documents kept for validation."
    )
    packing: Annotated[Literal["concat"], supported("packing", "concat")] = Field(
        "concat", description="How documents fill sequences: concat puts them one after another."
    )
    cache_dir: Text | None = Field(
        None, description="Folder of tokenised data; null means $QUAVER_CACHE, else ~/.cache/quaver."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> DataConfig:
        names = [source.name for source in self.sources if source.name is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise problem(
                f"two sources are named {twice[0]!r}", remedy="give each its own name", key="sources"
            )
        return self
