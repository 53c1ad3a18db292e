"""Fixtures of the micro run: its corpus, its configs, and what it wrote."""

import json
from pathlib import Path

import pytest
from helpers.micro import micro_document, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def micro(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """micro("mxfp8", "training.steps=4", ...) -> a parsed config."""
    from quaver.config import load_config

    cache = tmp_path_factory.getbasetemp() / "token-cache"

    def make(fmt: str, *overrides: str):
        return load_config(micro_document(fmt, str(corpus), str(cache)), overrides)

    return make


@pytest.fixture
def read_metrics():
    def read(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
