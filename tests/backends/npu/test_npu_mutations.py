"""Every argument of every call that the adapter makes: dropped, renamed, mistyped or mis-shaped, it is caught.

Caught: an error, or other numbers. Where the schema's default is the very value that was passed, leaving it out is no
mistake, and that is checked too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import npu_harness
from helpers.npu_harness.recording import Call, Recorder
from helpers.passes import one_pass
from helpers.policies import HIF8, RECIPES, policy

MX = ["npu_dynamic_mx_quant", "npu_dynamic_mx_quant_with_dual_axis", "npu_grouped_dynamic_mx_quant"]
GEMMS = ["npu_quant_matmul", "npu_grouped_matmul"]
CASES = [
    (recipe, op)
    for recipe in RECIPES
    for op in GEMMS + (["npu_dynamic_quant", "npu_quantize"] if recipe == HIF8 else MX)
]
OTHER_TAGS = (290, 291, 292, 293, 296, 44, 1)
OTHER_DTYPE = {
    torch.bfloat16: torch.float16,
    torch.float32: torch.bfloat16,
    torch.int64: torch.int32,
    torch.int32: torch.int64,
    torch.uint8: torch.int8,
    torch.float8_e4m3fn: torch.float8_e5m2,
}


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Call]]:
    found = {}
    for recipe in RECIPES:
        backend = npu_harness.backend()
        with Recorder() as recorder:
            one_pass(policy(recipe, backend))
        found[recipe] = list(recorder.calls.values())
    return found


def wrong_tensors(tensor: torch.Tensor, *, twin: bool) -> Iterator[tuple[str, Any]]:
    """The tensor in another dtype, shape, order or state; `twin`: its strides must go with another tensor's."""
    other = OTHER_DTYPE[tensor.dtype]
    yield "another dtype", tensor.view(other) if tensor.itemsize == other.itemsize else tensor.to(other)
    yield "one dimension more", tensor.unsqueeze(0)
    yield "one element less", tensor.narrow(-1, 0, tensor.shape[-1] - 1)
    yield "one row less", tensor.narrow(0, 0, tensor.shape[0] - 1)
    yield "no tensor", None
    if tensor.ndim >= 2:
        axis = -2 if tensor.ndim > 2 and tensor.shape[-1] == 2 and tensor.dtype is torch.uint8 else -1
        yield "transposed", tensor.transpose(axis, axis - 1)
        if twin:
            turned = tensor.transpose(axis, axis - 1)
            yield "another state", turned.contiguous().transpose(axis, axis - 1) if tensor.is_contiguous() else (
                tensor.contiguous()
            )
    if tensor.dtype in (torch.int64, torch.int32):
        yield "sizes in place of ends", tensor.diff(prepend=tensor.new_zeros(1))
        yield "a Python list", tensor.tolist()


def wrong_values(name: str, value: Any, *, twin: bool) -> Iterator[tuple[str, Any]]:
    """What could be passed for one argument by mistake."""
    if isinstance(value, torch.Tensor):
        yield from wrong_tensors(value, twin=twin)
    elif isinstance(value, list) and isinstance(value[0], torch.Tensor):
        yield from ((what, [wrong]) for what, wrong in wrong_tensors(value[0], twin=twin))
        yield "an empty list", []
        yield "twice", value * 2
    elif isinstance(value, list):
        yield "shorter", value[:-1]
        yield from ((f"entry {i}", [*value[:i], entry * 2, *value[i + 1 :]]) for i, entry in enumerate(value))
    elif isinstance(value, bool):
        yield "the other", not value
    elif isinstance(value, int):
        yield "one more", value + 1
        yield "text", str(value)
        yield "a fraction", value + 0.5
        if name.endswith(("_dtype", "_type")) or name == "dtype":
            yield from ((f"tag {tag}", tag) for tag in OTHER_TAGS if tag != value)
    elif isinstance(value, float):
        yield "twice", value * 2
        yield "text", str(value)
    elif isinstance(value, str):
        yield "another word", value + "s"
    elif value is None:
        yield "a tensor", torch.zeros(1)


def caught(call: Call, wanted: list[torch.Tensor], **changes: Any) -> bool:
    """True if the changed call fails, or gives other numbers."""
    try:
        found = call.run(**changes)
    except Exception:  # any: of the schema's binding, or of the operator
        return True
    return len(found) != len(wanted) or any(
        a.dtype is not b.dtype or a.shape != b.shape or not same_bits(a, b) for a, b in zip(found, wanted)
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def without_effect(call: Call, name: str) -> bool:
    """One scale has no axis (the operator then does not read it), and 1 divides as it multiplies."""
    if call.op != "npu_quantize":
        return False
    scales = call.arguments["scales"]
    return (name == "axis" and scales.numel() == 1) or (name == "div_mode" and bool((scales == 1).all()))


@pytest.mark.parametrize(("recipe", "op"), CASES)
def test_every_argument_matters(recorded, recipe, op):
    calls = [call for call in recorded[recipe] if call.op == op]
    assert calls
    survived, tried = [], 0
    for call in calls:
        wanted = call.run()
        for name, value in call.arguments.items():
            if without_effect(call, name):
                continue
            # an MXFP8 matrix and its scale share their state; HiF8's scale has none to share
            twin = op in GEMMS and recipe != HIF8
            for what, wrong in wrong_values(name, value, twin=twin):
                tried += 1
                if not caught(call, wanted, **{name: wrong}):
                    survived.append((name, what))
            if name not in call.positional:
                assert caught(call.without(name), wanted, **{f"{name}s": value}), name
            is_default = name in call.defaults() and call.defaults()[name] == value
            assert caught(call.without(name), wanted) is not is_default, f"{name} left out"
    assert survived == []
    assert tried > 20


def test_the_spelling_of_the_block_size(recorded):
    """It is block_size in one operator and blocksize in the other."""
    for recipe, (op, other) in itertools.product(
        RECIPES[:2], [("npu_dynamic_mx_quant", "blocksize"), ("npu_grouped_dynamic_mx_quant", "block_size")]
    ):
        call = next(call for call in recorded[recipe] if call.op == op)
        mine = "block_size" if other == "blocksize" else "blocksize"
        with pytest.raises(RuntimeError, match=other):
            call.without(mine).run(**{other: 32})


def test_the_tags_and_rules_of_every_call(recorded):
    """Pinned everywhere, the same in fprop, dgrad and wgrad: mistakes that others have made."""
    for recipe, calls in recorded.items():
        for call in calls:
            used = call.arguments
            if call.op in MX:
                assert used["dst_type"] == 292
                assert used["scale_alg"] == ("rceil" in recipe)
            if call.op == "npu_dynamic_quant":
                assert used["dst_type_max"] in (15.0, 224.0)
            if call.op in GEMMS and recipe == HIF8:
                names = ("x1_dtype", "x2_dtype") if call.op == "npu_quant_matmul" else ("x_dtype", "weight_dtype")
                assert [used[name] for name in names] == [290, 290]
    maxima = {c.arguments["dst_type_max"] for c in recorded[HIF8] if c.op == "npu_dynamic_quant"}
    assert maxima == {15.0, 224.0}


def test_hif8_codes_without_a_tag_are_refused(recorded):
    """The wheel's own shape function lets them pass."""
    call = next(call for call in recorded[HIF8] if call.op == "npu_quant_matmul")
    with pytest.raises(npu_harness.HarnessError):
        call.without("x1_dtype").run()
    with pytest.raises(npu_harness.HarnessError):
        call.without("x1_dtype").without("x2_dtype").run()
