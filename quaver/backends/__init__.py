"""Backends: what quantises and multiplies in eight bits, the contract they share, and the ledger.

Reading order: contract.py, ledger.py, codecs.py, reference.py; npu/ and cuda/ are imported only where they are chosen.
May import: torch, formats, config (types), errors.
"""

from quaver.backends.codecs import BUILTIN_CODECS, Codec
from quaver.backends.contract import (
    CONTRACTED,
    GEMMS,
    Backend,
    Gemm,
    GemmSite,
    Layout,
    OperandError,
    Orientation,
    QuantizationRole,
    QuantizedOperand,
    ScalingSpec,
    UncodedOperand,
)
from quaver.backends.ledger import Ledger, PlannedSite, in_backward
from quaver.backends.reference import ReferenceBackend
from quaver.backends.registry import backend_for

__all__ = [
    "BUILTIN_CODECS",
    "CONTRACTED",
    "GEMMS",
    "Backend",
    "Codec",
    "Gemm",
    "GemmSite",
    "Layout",
    "Ledger",
    "OperandError",
    "Orientation",
    "PlannedSite",
    "QuantizationRole",
    "QuantizedOperand",
    "ReferenceBackend",
    "ScalingSpec",
    "UncodedOperand",
    "backend_for",
    "in_backward",
]
