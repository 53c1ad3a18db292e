"""Everything that is timed, run at small sizes: that it runs, and that it is what its name says. No times."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quaver.bench import groups, run_bench, torchao_peer
from quaver.bench.experts import even_routing, source_experts, uneven_routing
from quaver.bench.floor import bare_gemms
from quaver.bench.operators import drawn
from quaver.bench.policies import policy
from quaver.bench.sizes import FULL, Sizes
from quaver.bench.steps import built, one_batch, our_step, world
from quaver.bench.stock import stock_step
from quaver.low_precision import quantize_weights
from quaver.models import DeepseekV3LowPrecisionExperts, build_on_meta, load_hf_config


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
    counts = torch.bincount(uneven_routing(*sizes).flatten(), minlength=experts).tolist()
    assert sum(counts) == tokens * top_k
    assert all(a != b for a, b in pairwise(counts))
    if tokens * top_k // experts % 32 == 0:
        assert all(count % 32 == 0 and count > 0 for count in counts)


def test_a_second_run_in_one_process_finds_the_settings_as_they_were(small: Sizes) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
    for _ in range(2):
        run_bench(["step.mxfp8.over_bf16"], pairs=1, sizes=small)
        now = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
        assert now == before


def test_the_floor_has_the_products_of_a_step(small: Sizes) -> None:
    """Against a count by hand: six FLOPs a weight and token for layers, twelve T a score row for attention."""
    model = build_on_meta(load_hf_config("deepseek_v3", small.model))
    c, tokens = model.config, small.batch * small.seq_len
    layers = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    layers += c.n_routed_experts * c.hidden_size  # the router of the one MoE layer
    layers += c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size  # the experts a token takes
    heads = small.batch * c.num_attention_heads * c.num_hidden_layers
    wide, narrow = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    attention = heads * small.seq_len**2 * 2 * (wide + narrow) * 3
    with FlopCounterMode(display=False) as counted:
        bare_gemms(small)()
    assert counted.get_total_flops() == 6 * tokens * layers + attention


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
