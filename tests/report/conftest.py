"""Run folders on disk."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def make_run(tmp_path):
    def make(name, lines, *, text=None, config=None, **documents) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        written = "".join(json.dumps(line) + "\n" for line in lines) if text is None else text
        (folder / "metrics.jsonl").write_text(written, encoding="utf-8")
        if config is not None:
            (folder / "config.yaml").write_text(config, encoding="utf-8")
        for stem, document in documents.items():
            (folder / f"{stem}.json").write_text(json.dumps(document), encoding="utf-8")
        return folder

    return make
