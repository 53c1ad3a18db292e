"""The codecs that come with the reference backend, by format name. May import: codec and the codecs."""

from __future__ import annotations

from quaver.backends.codec import BlockCodec, Codec, Coded, Factors, KernelCodec, Sides
from quaver.backends.hif8_codec import HiF8Codec, tensor_amax
from quaver.backends.mxfp8_codec import MXFP8Codec

BUILTIN_CODECS: dict[str, Codec] = {"mxfp8_e4m3": MXFP8Codec(), "hif8": HiF8Codec()}

__all__ = [
    "BUILTIN_CODECS",
    "BlockCodec",
    "Codec",
    "Coded",
    "Factors",
    "HiF8Codec",
    "KernelCodec",
    "MXFP8Codec",
    "Sides",
    "tensor_amax",
]
