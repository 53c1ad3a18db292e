"""Shares the corpus of the training tests."""

import importlib.util
from pathlib import Path

_file = Path(__file__).parents[2] / "training" / "conftest.py"
_spec = importlib.util.spec_from_file_location("training_conftest", _file)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
corpus = _module.corpus
