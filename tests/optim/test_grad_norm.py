import math
import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from quaver.errors import PlanError
from quaver.optim import clip_, grad_norm, gradient_norm

SHAPES = [(), (1,), (7,), (5, 3), (33, 100), (8, 16, 32), (3, 70_001), (2, 131_072), (4, 1)]


def parameters(shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in made:
        # magnitudes over 9 decades: FP64 sums of squares of one magnitude are nearly exact and would hide the
        # order
        magnitude = 10.0 ** (9 * torch.rand(parameter.shape, generator=generator) - 9)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * magnitude
    return made


def defined_order(values):
    """The module's order, written out on Python floats: fold by halves, an odd last one joins the first."""
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        folded = [values[i] + values[half + i] for i in range(half)]
        if len(values) % 2:
            folded[0] += values[-1]
        values = folded
    return values[0]


def test_agrees_with_torch_in_fp64():
    made = parameters()
    flat = torch.cat([p.grad.double().flatten() for p in made])
    norm = gradient_norm(made)
    assert norm.dtype == torch.float64
    assert norm.ndim == 0
    torch.testing.assert_close(norm, torch.linalg.vector_norm(flat), rtol=1e-12, atol=0)
    exact = math.sqrt(math.fsum(v * v for v in flat.tolist()))  # correctly rounded sum of exact squares
    assert norm.item() == pytest.approx(exact, rel=1e-15)


def test_bits_are_those_of_the_documented_order():
    made = parameters([(), (7,), (5, 3), (13, 100), (2, 70_001)])
    row_sums = []
    for parameter in made:
        rows = parameter.grad.reshape(parameter.shape[0] if parameter.ndim else 1, -1).double()
        for row in rows:
            pieces = [defined_order([v * v for v in piece.tolist()]) for piece in row.split(65_536)]
            row_sums.append(defined_order(pieces))
    assert torch.cat(grad_norm.row_square_sums([p.grad for p in made])).tolist() == row_sums
    assert gradient_norm(made).item() == math.sqrt(defined_order(row_sums))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    block=st.sampled_from([1, 64, 1000, 262_144]),
)
def test_row_sums_do_not_depend_on_the_split_or_the_block(rows, width, cuts, block):
    gradient = parameters([(rows, width)], seed=rows * 1000 + width)[0].grad
    whole = grad_norm.row_square_sums([gradient])[0]
    edges = sorted({0, rows, *(min(c, rows) for c in cuts)})
    parts = [gradient[a:b] for a, b in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_norm, "_BLOCK", block)
        split = grad_norm.row_square_sums([*parts, torch.ones(3, width)])
    assert torch.equal(torch.cat(split[:-1]), whole)


def test_threads_change_no_bit():
    made = parameters([(1, 60_000), (300, 4096), (70_000,)])
    before = torch.get_num_threads()
    norms = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.append(gradient_norm(made).item())
    finally:
        torch.set_num_threads(before)
    assert len(set(norms)) == 1


def test_empty_and_missing_gradients():
    made = parameters([(3, 2), (2, 2), (0, 4)])
    made[0].grad = None
    expected = made[1].grad.double().norm()
    torch.testing.assert_close(gradient_norm(made), expected, rtol=1e-14, atol=0)
    made[1].grad = made[2].grad = None
    with pytest.raises(PlanError, match="no parameter has a gradient"):
        gradient_norm(made)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 1, 4, 6])
def test_one_non_finite_element_shows_and_cannot_be_clipped(value, index):
    made = parameters()
    made[index].grad.view(-1)[-1] = value
    norm = gradient_norm(made)
    assert not torch.isfinite(norm)
    before = made[3].grad.clone()
    with pytest.raises(PlanError, match="cannot be clipped"):
        clip_(made, norm, 1.0)
    assert torch.equal(made[3].grad, before)


def test_squares_beyond_fp32_do_not_overflow_or_vanish():
    made = parameters([(2,), (2,)])
    made[0].grad = torch.tensor([3e30, 4e30])
    made[1].grad = torch.zeros(2)
    assert gradient_norm(made).item() == pytest.approx(5e30, rel=1e-7)
    made[0].grad = torch.tensor([3e-30, 4e-30])
    assert gradient_norm(made).item() == pytest.approx(5e-30, rel=1e-7)


def test_clip_multiplies_once_by_the_fp32_coefficient():
    made = parameters()
    before = [p.grad.clone() for p in made]
    norm = gradient_norm(made)
    coefficient = clip_(made, norm, 0.1)
    expected = torch.tensor(0.1 / (norm.item() + 1e-6)).item()
    assert coefficient == expected
    assert coefficient < 1
    for parameter, old in zip(made, before):
        assert torch.equal(parameter.grad, old * torch.tensor(coefficient))
    assert gradient_norm(made).item() == pytest.approx(0.1, rel=1e-4)


def test_clip_has_the_same_bits_whatever_the_grouping():
    whole, pieces = parameters([(40, 64)]), []
    norm = gradient_norm(whole)
    for part in whole[0].grad.clone().split(7):
        pieces.append(nn.Parameter(torch.zeros_like(part)))
        pieces[-1].grad = part
    clip_(whole, norm, 0.01)
    clip_(pieces, norm, 0.01)
    assert torch.equal(torch.cat([p.grad for p in pieces]), whole[0].grad)


def test_small_norms_are_left_alone():
    made = parameters()
    before = [p.grad.clone() for p in made]
    assert clip_(made, gradient_norm(made), 1e6) == 1.0
    assert all(torch.equal(p.grad, old) for p, old in zip(made, before))
    with pytest.raises(PlanError, match="not positive"):
        clip_(made, gradient_norm(made), 0.0)


DISTRIBUTED_SHAPES = [(), (7,), (5, 3), (33, 100), (1, 40), (8, 16, 32), (3, 70_001)]


def _sharded(rank, world_size, rendezvous, result):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    made = parameters(DISTRIBUTED_SHAPES)
    for parameter in made:
        placement = Shard(0) if parameter.ndim else Replicate()
        full, parameter.grad = parameter.grad, None
        parameter.data = distribute_tensor(parameter.data, mesh, [placement])
        parameter.grad = distribute_tensor(full, mesh, [placement])
    gradients = [parameter.grad for parameter in made]
    rows = grad_norm._gather(gradients, grad_norm.row_square_sums([g.to_local() for g in gradients]))
    norm = gradient_norm(made)
    clip_(made, norm, 0.1)
    clipped = [parameter.grad.full_tensor() for parameter in made]
    refused = ""
    made[0].grad = DTensor.from_local(torch.ones(()), mesh, [Partial()])
    try:
        gradient_norm(made[:1])
    except PlanError as error:
        refused = str(error)
    torch.save({"rows": rows, "norm": norm, "clipped": clipped, "refused": refused}, f"{result}.{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that winds down while its peer leaves


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_gradients_give_the_bits_of_one_process(tmp_path, world_size):
    made = parameters(DISTRIBUTED_SHAPES)
    rows = grad_norm.row_square_sums([p.grad for p in made])
    norm = gradient_norm(made)
    clip_(made, norm, 0.1)
    mp.spawn(_sharded, (world_size, tmp_path / "rendezvous", tmp_path / "result"), nprocs=world_size)
    for rank in range(world_size):
        got = torch.load(f"{tmp_path / 'result'}.{rank}", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(got["rows"], rows, strict=True))
        assert got["norm"].item() == norm.item()
        assert all(torch.equal(a, p.grad) for a, p in zip(got["clipped"], made))
        assert "P(sum)" in got["refused"]


def test_one_rank_needs_no_communication(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_single", None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        made, plain = parameters([(5, 3)]), parameters([(5, 3)])
        full, made[0].grad = made[0].grad, None
        made[0].data = DTensor.from_local(made[0].data, mesh, [Shard(0)])
        made[0].grad = DTensor.from_local(full, mesh, [Shard(0)])
        assert gradient_norm(made).item() == gradient_norm(plain).item()
    finally:
        dist.destroy_process_group()
