"""Shares the corpus of the training tests, and the start of a case."""

import importlib.util
from pathlib import Path

import pytest

_file = Path(__file__).parents[1] / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("training_conftest", _file)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
corpus = _module.corpus


@pytest.fixture(scope="session")
def case(corpus, tmp_path_factory):
    """case(format="mxfp8", ...) -> a case of cases.py over the shared corpus and token cache."""
    cache = str(tmp_path_factory.getbasetemp() / "ranks-cache")

    def make(**rest) -> dict:
        return {"corpus": str(corpus), "cache": cache, **rest}

    return make
