from collections.abc import Callable
from pathlib import Path

import pytest

from quaver.config import DataConfig, SourceConfig


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., DataConfig]:
    """config(path or (path, weight, name), ..., field=value): a data section with a cache of its own."""

    def build(*sources: object, **fields: object) -> DataConfig:
        entries = []
        for source in sources:
            path, weight, name = source if isinstance(source, tuple) else (source, 1.0, None)
            entries.append(SourceConfig(path=str(path), weight=weight, name=name))
        settings = {"seq_len": 16, "cache_dir": str(tmp_path / "cache"), **fields}
        return DataConfig(sources=tuple(entries), **settings)

    return build


def document(number: int) -> str:
    """A document of its own text, with letters of one to four bytes."""
    return f"Document {number}: café, 你好, 😀.\n" + f"Line {number * number}.\n" * (1 + number % 7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty .txt files in nested folders."""
    root = tmp_path / "corpus"
    for number in range(40):
        file = root / f"part-{number % 3}" / f"{number:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document(number), encoding="utf-8")
    return root
