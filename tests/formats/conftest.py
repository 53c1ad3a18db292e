"""Inputs that several codec tests share."""

from __future__ import annotations

import numpy as np
import pytest
from format_vectors import tensor_from_bits
from torch import Tensor


@pytest.fixture(scope="session")
def all_bf16() -> Tensor:
    """Every bfloat16 bit pattern, index = pattern."""
    return tensor_from_bits(np.arange(65536, dtype=np.uint16))


@pytest.fixture(scope="session")
def random_fp32_bits() -> Tensor:
    """A million FP32 words of uniformly random bits: every exponent, subnormals, Inf's neighbours, NaNs."""
    return tensor_from_bits(np.random.default_rng(7).integers(0, 2**32, 1_000_000, dtype=np.uint32))
