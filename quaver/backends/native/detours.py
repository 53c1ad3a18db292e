"""What kernels leave to slower operations of torch here, though they run: nobody should have to guess.

May import: torch, kernels, packing, experts.
"""

from __future__ import annotations

from typing import Any

import torch

from quaver.backends.native import experts, packing
from quaver.backends.native.kernels import status


def detours() -> list[str]:
    """A sentence for each; empty where everything is taken, or where no kernels run at all."""
    if status().path != "native":
        return []
    found = []
    if not packing.supported():
        found.append(
            f"weights are not packed for GEMMs: torch {torch.__version__} is not {packing.KNOWN_TORCH}x, or does not"
            " give BF16 products to oneDNN"
        )
    if not experts.sigmoids_serve():
        found.append("SwiGLU is computed by torch before it is quantised: this torch's SiLU has other bits than ours")
    return found


def described() -> dict[str, Any]:
    """`status` and its detours, for environment.json and `quaver bench --json`."""
    return {**status().to_json(), "detours": detours()}
