"""The two eight-bit formats as pure functions on tensors: `hif8` (HiFloat8) and `mxfp8` (OCP MX, E4M3).

Why a room of its own: everything that Quaver says about numbers rests on these codecs being exact on every
input, so they know nothing of weights, modules, backends or configs. Exact includes subnormals, as long as
torch.set_flush_denormal is off (its default). This room imports torch and nothing else.
"""

from quaver.formats import hif8, mxfp8

__all__ = ["hif8", "mxfp8"]
