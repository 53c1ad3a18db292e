"""Everything that is timed, run at small sizes: that it runs, and that it is what its name says. No times."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quaver.backends.contract import QuantizedOperand, UncodedOperand
from quaver.bench import groups, run_bench, torchao_peer
from quaver.bench.experts import UNEVEN, even_routing, expert_contestants, source_experts, uneven_routing
from quaver.bench.floor import attention_products, bare_gemms
from quaver.bench.operators import drawn, linear_contestants, quantise_contestants
from quaver.bench.policies import policy
from quaver.bench.sizes import FULL, Sizes
from quaver.bench.steps import built, one_batch, our_step, world
from quaver.bench.stock import stock_step
from quaver.low_precision import Quantizer, quantize_weights
from quaver.models import DeepseekV3LowPrecisionExperts, build_on_meta, load_hf_config
from quaver.models.causal_blocks import causal_attention


def test_the_model_of_the_step_is_the_one_that_is_promised() -> None:
    model = build_on_meta(load_hf_config("deepseek_v3", FULL.model))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert 33 <= millions < 34
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (512, 4, 8192)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (16, 4)
    assert (FULL.batch, FULL.seq_len, FULL.tokens, FULL.linear) == (4, 512, 2048, (2048, 2816))


@pytest.mark.parametrize("name", [group.name for group in groups()])
def test_every_group_runs_and_gives_all_its_figures(name: str, small: Sizes) -> None:
    group = next(group for group in groups() if group.name == name)
    told: list[int] = []
    results = group.run(small, 2, told.append)
    assert [r.name for r in results] == [c.name for c in group.comparisons]
    for result in results:
        assert result.pairs == 2
        assert math.isfinite(result.min)
        assert result.min <= result.ratio <= result.max < math.inf
        # What a save costs is a difference of two times, which noise takes below nothing.
        assert result.min > 0 or result.name == "checkpoint.lost"
    assert told[-1] == 2


@pytest.mark.parametrize("sizes", [(2048, 16, 4), (128, 4, 2), (512, 8, 2)], ids=str)
def test_uneven_experts_have_whole_blocks_and_no_neighbour_of_their_length(sizes: tuple[int, int, int]) -> None:
    tokens, experts, top_k = sizes
    index = uneven_routing(*sizes)
    assert index.shape == (tokens, top_k)
    counts = torch.bincount(index.flatten(), minlength=experts).tolist()
    assert sum(counts) == tokens * top_k
    assert all(a != b for a, b in pairwise(counts))
    assert all(count % 32 == 0 and count > 0 for count in counts)
    assert all(len(set(row)) == top_k for row in index.tolist())  # a router never chooses an expert twice


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((100, 3, 2), "a mean of 64, 96"),  # does not divide
        ((96, 4, 2), "a mean of 64, 96"),  # 48 tokens each
        ((64, 4, 2), "a mean of 64, 96"),  # 32 each: nothing can be moved and a whole block be left
        ((64, 2, 2), "would give an expert 96 tokens"),
    ],
    ids=str,
)
def test_sizes_that_no_uneven_routing_is_made_of_are_told(sizes: tuple[int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        uneven_routing(*sizes)


def test_sizes_of_which_only_even_routing_is_made_measure_that(small: Sizes) -> None:
    sizes = replace(small, tokens=64)
    with expert_contestants(sizes, frozenset({"bf16"})) as contestants:
        assert list(contestants) == ["bf16"]
    with pytest.raises(ValueError, match="uneven"), expert_contestants(sizes, frozenset({f"bf16{UNEVEN}"})):
        pass


def test_the_order_of_turns_does_not_hang_on_the_hashes_of_strings(small: Sizes) -> None:
    class Backwards(set):
        """A set that a loop over its common part with another one would find in the other order."""

        def __rand__(self, other: set[str]) -> list[str]:
            return sorted(set(self) & set(other))

    with linear_contestants(small, Backwards({"mxfp8", "hif8", "bf16"})) as contestants:
        assert list(contestants) == ["bf16", "mxfp8", "hif8"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("both", (QuantizedOperand, QuantizedOperand)),
        ("gradient", (UncodedOperand, UncodedOperand)),
        ("input", (UncodedOperand, QuantizedOperand)),
    ],
)
def test_quantising_makes_what_its_name_says(
    name: str, kinds: tuple[type, type], small: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes both ways; values both ways as of a gradient; values by row and codes by column as of an input."""
    made: list[tuple[QuantizedOperand, QuantizedOperand]] = []
    dual = Quantizer.quantize_dual
    monkeypatch.setattr(Quantizer, "quantize_dual", lambda *a, **k: made.append(dual(*a, **k)))
    with quantise_contestants(small, frozenset()) as contestants:
        contestants[f"mxfp8 {name}"]()
    ((row, col),) = made
    assert (type(row), type(col)) == kinds


def test_a_second_run_in_one_process_finds_the_settings_as_they_were(small: Sizes) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
    for _ in range(2):
        run_bench(["step.mxfp8.over_bf16"], pairs=1, sizes=small)
        now = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
        assert now == before


@pytest.mark.parametrize(
    ("seq_len", "scores"), [(32, 32 * 32), (300, 128 * 128 + 128 * 256 + 44 * 300)], ids=["one block", "three"]
)
def test_the_floor_has_the_products_of_a_step(seq_len: int, scores: int, small: Sizes) -> None:
    """Against a count by hand: six FLOPs a weight and token for layers, and for attention as many a score and width.

    A block of 128 queries has scores for the keys up to its last query.
    """
    small = replace(small, seq_len=seq_len)
    model = build_on_meta(load_hf_config("deepseek_v3", small.model))
    c, tokens = model.config, small.batch * small.seq_len
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    layers += c.n_routed_experts * c.hidden_size  # the router of the one MoE layer
    layers += c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size  # the experts a token takes
    heads = small.batch * c.num_attention_heads * c.num_hidden_layers
    wide, narrow = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    attention = heads * scores * 2 * (wide + narrow) * 3
    with FlopCounterMode(display=False) as counted:
        bare_gemms(small)()
    assert counted.get_total_flops() == 6 * tokens * layers + attention


def test_the_floors_attention_is_what_our_attention_multiplies(small: Sizes) -> None:
    sizes = replace(small, seq_len=300)
    heads, width = small.model["num_attention_heads"], 32
    shapes = [(sizes.batch, heads, 300, n) for n in (width, width, small.model["v_head_dim"])]
    q, k, v = (drawn(*shape).bfloat16().requires_grad_() for shape in shapes)
    with FlopCounterMode(display=False) as ours:
        causal_attention(q, k, v, 1.0).sum().backward()
    with FlopCounterMode(display=False) as floor:
        for product in attention_products(sizes):
            product()
    assert floor.get_total_flops() == ours.get_total_flops()


def test_our_step_and_stock_train_the_same_model(small: Sizes) -> None:
    """Both take a step, and both have as many parameters that moved as the model has."""
    batch = one_batch(small)
    assert batch.input_ids.shape == (small.batch, small.seq_len)
    assert int(batch.input_ids.max()) < small.model["vocab_size"]
    with world():
        assembly = built("mxfp8", small)
        before = {n: p.detach().clone() for n, p in assembly.model.named_parameters()}
        our_step(assembly, batch)
        moved = [n for n, p in assembly.model.named_parameters() if not torch.equal(p.detach(), before[n])]
        assert len(moved) == len(before)
        assembly.router_bias.close()
    step = stock_step(small, batch, lr=1e-4, clip_norm=1.0)
    model = next(c.cell_contents for c in step.__closure__ or () if isinstance(c.cell_contents, nn.Module))
    assert {tuple(p.shape) for p in model.parameters()} == {tuple(p.shape) for p in before.values()}
    assert model.config._attn_implementation == "sdpa"
    first = model.lm_head.weight.detach().clone()
    step()
    assert not torch.equal(model.lm_head.weight, first)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(64, 4, 2), (2048, 16, 4), (96, 8, 3)])
def test_routing_is_even_and_chooses_different_experts(tokens: int, experts: int, top_k: int) -> None:
    index = even_routing(tokens, experts, top_k)
    assert index.shape == (tokens, top_k)
    assert torch.bincount(index.flatten(), minlength=experts).tolist() == [tokens * top_k // experts] * experts
    assert all(len(set(row)) == top_k for row in index.tolist())


def test_torchaos_experts_compute_what_ours_compute(small: Sizes) -> None:
    """The peer does the same work: its output and input gradient are those of our MXFP8 experts."""
    source = source_experts(small, torch.float32)
    peer = torchao_peer.Experts(source.gate_up_proj.detach(), source.down_proj.detach())
    ours = DeepseekV3LowPrecisionExperts.from_experts(source, fqn="experts", policy=policy("mxfp8"))
    quantize_weights(ours)
    x = drawn(small.tokens, small.hidden).bfloat16().requires_grad_()
    index = even_routing(small.tokens, small.experts, small.top_k)
    weight = torch.softmax(drawn(small.tokens, small.top_k), -1).bfloat16()
    toward = drawn(small.tokens, small.hidden, seed=1).bfloat16()
    found = [ours(x, index, weight), peer(x, index, weight)]
    grads = [torch.autograd.grad(y, x, toward)[0] for y in found]
    for a, b in (found, grads):
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()
