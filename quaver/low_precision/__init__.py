"""Eight-bit training of layers: recipes, quantised weights at rest and in flight, dense and grouped autograd.

Reading order: recipe.py, quantized.py, master.py (master_ops.py), dense.py, grouped.py, modules.py, refresh.py.
"""

from quaver.low_precision.dense import low_precision_linear
from quaver.low_precision.extension import FormatExtension, build_policy
from quaver.low_precision.grouped import low_precision_grouped_swiglu
from quaver.low_precision.master import MasterWeight, WeightState
from quaver.low_precision.modules import (
    LowPrecisionLinear,
    LowPrecisionModule,
    as_compute_dtype,
    replace_low_precision_linear,
)
from quaver.low_precision.ops import low_precision_grouped_matmul, low_precision_matmul
from quaver.low_precision.quantized import (
    WEIGHT_CLASSES,
    HiF8Tensor,
    MXFP8Tensor,
    PerTensorWeight,
    QuantizedWeightTensor,
    WeightSpec,
)
from quaver.low_precision.recipe import (
    RECIPES,
    LowPrecisionPolicy,
    LowPrecisionRecipe,
    Quantizer,
    RecipeSpec,
    policy_for,
)
from quaver.low_precision.refresh import (
    low_precision_modules,
    planned_sites,
    quantised_weights,
    quantize_weights,
    refresh,
    refresh_low_precision_weights,
    refresh_stale,
)

__all__ = [
    "RECIPES",
    "WEIGHT_CLASSES",
    "FormatExtension",
    "HiF8Tensor",
    "LowPrecisionLinear",
    "LowPrecisionModule",
    "LowPrecisionPolicy",
    "LowPrecisionRecipe",
    "MXFP8Tensor",
    "MasterWeight",
    "PerTensorWeight",
    "QuantizedWeightTensor",
    "Quantizer",
    "RecipeSpec",
    "WeightSpec",
    "WeightState",
    "as_compute_dtype",
    "build_policy",
    "low_precision_grouped_matmul",
    "low_precision_grouped_swiglu",
    "low_precision_linear",
    "low_precision_matmul",
    "low_precision_modules",
    "planned_sites",
    "policy_for",
    "quantised_weights",
    "quantize_weights",
    "refresh",
    "refresh_low_precision_weights",
    "refresh_stale",
    "replace_low_precision_linear",
]
