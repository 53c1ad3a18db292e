"""Quaver trains mixture-of-experts language models in eight bits (MXFP8, HiF8) with PyTorch FSDP2.

The public names below are handed out lazily (PEP 562): `import quaver` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> room that defines it; rooms themselves (quaver.formats, ...) are ordinary subpackages.
_PUBLIC = {
    "train": "quaver.training",
    "RunResult": "quaver.training",
    "LowPrecisionConfig": "quaver.config",
    "ReplacementRule": "quaver.config",
    "quantize_modules": "quaver.assembly",
    "attach": "quaver.assembly",
    "refresh": "quaver.assembly",
    "QuantizedModel": "quaver.assembly",
    "QuaverError": "quaver.errors",
}
_ROOMS = ("formats", "low_precision", "backends", "models", "surgery", "errors", "config", "data", "report")

__all__ = ["__version__", *_PUBLIC, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        importlib.import_module("quaver.quiet").drop_known_noise()
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"quaver.{name}")
    raise AttributeError(f"module 'quaver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
