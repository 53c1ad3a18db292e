"""Attention of unequal heads against a softmax in FP64, and that torch's flash kernel is what ran."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import TINY, TINY_LLAMA
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from quaver.models import build_on_meta, causal_blocks, from_hf_config, load_hf_config
from quaver.models.attention import UNEQUAL_HEADS, has_unequal_heads, unequal_heads_attention
from quaver.models.causal_blocks import causal_attention

HEADS: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True)
MLA = {**TINY, "v_head_dim": 24}  # Q and K have 32

# rounding of the output and of a gradient: BF16 has 8 bits, and the probabilities are rounded to it as well
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 2**-18}


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """softmax(scale Q K' + mask) V over keys that are not later than the query, written out; [B, T, heads, V]."""
    scores = q @ k.transpose(-1, -2) * scale
    if mask is None:
        T = q.shape[-2]
        mask = torch.ones(T, T, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def qkv(dtype: torch.dtype, width: int, value_width: int, T: int = 70) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(2, 3, T, d, generator=generator).to(dtype).requires_grad_()
        for d in (width, width, value_width)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "value_width"), [(24, 16), (48, 32), (16, 24), (16, 16)])
@pytest.mark.parametrize("masking", ["causal", "bool", "additive"])
@pytest.mark.parametrize("scaling", [0.3, None])
def test_output_and_gradients_are_those_of_fp64(
    dtype: torch.dtype, width: int, value_width: int, masking: str, scaling: float | None
) -> None:
    inputs = qkv(dtype, width, value_width)
    mask: torch.Tensor | None = None
    if masking != "causal":
        mask = torch.ones(70, 70, dtype=torch.bool).tril()
        mask = (mask & (torch.arange(70) % 9 != 4) | torch.eye(70, dtype=torch.bool))[None, None]
    if masking == "additive" and mask is not None:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    output, weights = unequal_heads_attention(HEADS, *inputs, mask, scaling=scaling)
    assert weights is None
    assert output.shape == (2, 70, 3, value_width)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    wanted = oracle(*exact, exact_mask, scaling if scaling is not None else width**-0.5)
    toward = torch.randn(output.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    got = [output, *torch.autograd.grad(output, inputs, toward)]
    want = [wanted, *torch.autograd.grad(wanted, exact, toward.double())]
    for ours, theirs in zip(got, want):
        assert ours.dtype == dtype
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCE[dtype]


def kernels(call: Any) -> set[str]:
    """Names of the SDPA kernels that a forward and backward take."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    return {event.key for event in profiled.key_averages() if event.key.startswith("aten::_scaled_dot")}


@pytest.mark.parametrize("case", ["masked", "float32", "long"])
def test_the_flash_kernel_runs_where_blocks_do_not(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(torch.float32 if case == "float32" else torch.bfloat16, 24, 16)
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril() if case == "masked" else None
    if case == "long":
        monkeypatch.setattr(causal_blocks, "KEPT", 3 * 70 * 70 // 2 - 1)

    def run() -> None:
        unequal_heads_attention(HEADS, q, k, v, mask)[0].sum().backward()

    ran = kernels(run)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in ran
    assert not any("math" in name for name in ran)


def test_training_runs_in_blocks() -> None:
    q, k, v = qkv(torch.bfloat16, 24, 16)
    assert not kernels(lambda: unequal_heads_attention(HEADS, q, k, v, None)[0].sum().backward())


@pytest.mark.parametrize("T", [2, 127, 128, 129, 300])
def test_blocks_of_any_length_give_fp64s_numbers(T: int) -> None:
    inputs = qkv(torch.bfloat16, 48, 32, T)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours, wanted = causal_attention(*inputs, 0.2).transpose(1, 2), oracle(*exact, None, 0.2)
    toward = torch.randn(ours.shape, generator=torch.Generator().manual_seed(6)).bfloat16()
    got = [ours, *torch.autograd.grad(ours, inputs, toward)]
    want = [wanted, *torch.autograd.grad(wanted, exact, toward.double())]
    for name, a, b in zip(("output", "dq", "dk", "dv"), got, want):
        # BF16 rounds to 2^-9; probabilities and their gradients are rounded once each, outputs once more
        assert (a.double() - b).norm() <= 2**-7.5 * b.norm(), name


def test_keys_that_come_later_are_not_seen() -> None:
    q, k, v = (x.detach() for x in qkv(torch.bfloat16, 48, 32, 300))
    before = causal_attention(q, k, v, 0.2)
    k[:, :, 200:], v[:, :, 200:] = 7.0, 1e4
    after = causal_attention(q, k, v, 0.2)
    assert torch.equal(after[:, :, :200], before[:, :, :200])
    assert not torch.equal(after[:, :, 200:], before[:, :, 200:])


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_batch_or_the_threads(threads: int) -> None:
    inputs = qkv(torch.bfloat16, 48, 32, 300)
    toward = torch.randn(2, 3, 300, 32, generator=torch.Generator().manual_seed(6)).bfloat16()

    def run(part: slice) -> list[torch.Tensor]:
        heads = [x.detach()[part].requires_grad_() for x in inputs]
        out = causal_attention(*heads, 0.2)
        return [out, *torch.autograd.grad(out, heads, toward[part])]

    whole, held = run(slice(0, 2)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for both, alone in zip(whole, run(slice(1, 2))):
            assert torch.equal(both[1:], alone)
    finally:
        torch.set_num_threads(held)


def test_grouped_heads_and_decoding_from_a_cache() -> None:
    q, k, v = (x.detach() for x in qkv(torch.float32, 24, 16))
    grouped: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    one = unequal_heads_attention(grouped, q[:, :, -1:], k[:, :1], v[:, :1], None)[0]
    k3, v3 = (x[:, :1].expand(-1, 3, -1, -1).double() for x in (k, v))
    every = torch.ones(1, 70, dtype=torch.bool)  # one query, the last, sees every key
    wanted = oracle(q[:, :, -1:].double(), k3, v3, every, 24**-0.5)
    assert (one.double() - wanted).abs().max() < 1e-5


def test_only_sdpa_with_unequal_heads_takes_the_other_name() -> None:
    mla, equal = load_hf_config("deepseek_v3", MLA), load_hf_config("deepseek_v3", {**TINY, "v_head_dim": 32})
    assert has_unequal_heads(mla)
    assert build_on_meta(mla, "bfloat16", "sdpa").config._attn_implementation == UNEQUAL_HEADS
    assert build_on_meta(mla, "bfloat16", "eager").config._attn_implementation == "eager"
    assert build_on_meta(equal, "bfloat16", "sdpa").config._attn_implementation == "sdpa"
    llama = load_hf_config("llama", TINY_LLAMA)
    assert build_on_meta(llama, "bfloat16", "sdpa").config._attn_implementation == "sdpa"


def model(implementation: str) -> nn.Module:
    torch.manual_seed(11)
    overrides = {**MLA, "num_hidden_layers": 2}
    return from_hf_config(
        "deepseek_v3", config_overrides=overrides, torch_dtype="float32", attn_implementation=implementation
    )


def gradients(net: nn.Module, ids: torch.Tensor, **kwargs: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = net(input_ids=ids, use_cache=False, **kwargs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_gives_what_eager_attention_gives(padded: bool) -> None:
    ids = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(2))
    kwargs = {}
    if padded:  # an attention mask of its own: the last three tokens of a row are padding
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        kwargs["attention_mask"] = mask
    ours, eager = gradients(model("sdpa"), ids, **kwargs), gradients(model("eager"), ids, **kwargs)
    assert ours.keys() == eager.keys()
    for name, wanted in eager.items():
        assert (ours[name] - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max())), name


def test_recompute_and_deterministic_mode_give_the_same_bits() -> None:
    ids = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(2))
    plain, again = model("sdpa"), model("sdpa")
    for layer in again.get_submodule("model.layers"):
        inner = layer.forward
        layer.forward = lambda *a, inner=inner, **k: checkpoint(inner, *a, use_reentrant=False, **k)
    torch.use_deterministic_algorithms(True)
    try:
        wanted, got = gradients(plain, ids), gradients(again, ids)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def test_meta_forward_has_the_right_shape() -> None:
    q, k, v = (torch.empty(2, 3, 9, d, device="meta") for d in (24, 24, 16))
    output = unequal_heads_attention(HEADS, q, k, v, None)[0]
    assert output.is_meta
    assert output.shape == (2, 9, 3, 16)


def test_a_saved_model_names_no_attention_of_ours(tmp_path: Path) -> None:
    net = from_hf_config("deepseek_v3", config_overrides=MLA)
    net.save_pretrained(tmp_path)
    assert UNEQUAL_HEADS not in (tmp_path / "config.json").read_text()


def test_autocast_does_not_round_the_scores() -> None:
    inputs = qkv(torch.bfloat16, 24, 16)
    plain = causal_attention(*inputs, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = causal_attention(*inputs, 0.3)
    assert torch.equal(plain, cast)
