import pytest
import torch
from torch import nn

from quaver.errors import PlanError
from quaver.optim import build_adamw

KEYS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}


def test_vectors_do_not_decay_matrices_and_embeddings_do():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "linear": nn.Linear(3, 2), "norm": nn.RMSNorm(3)})
    optimizer = build_adamw(model.named_parameters(), **KEYS)
    found = {group["name"]: (group["param_names"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {
        "decay": (["embed.weight", "linear.weight"], 0.5),
        "no_decay": (["linear.bias", "norm.weight"], 0.0),
    }
    assert all(group["fused"] for group in optimizer.param_groups)


def test_first_step_equals_the_paper_by_hand():
    """Step 1 of AdamW: bias correction cancels, so w <- w (1 - lr wd) - lr g / (|g| + eps)."""
    matrix, vector = nn.Parameter(torch.full((1, 2), 2.0)), nn.Parameter(torch.full((2,), 2.0))
    optimizer = build_adamw([("w", matrix), ("b", vector)], **KEYS)
    for parameter in (matrix, vector):
        parameter.grad = torch.tensor([0.25, -4.0]).reshape(parameter.shape)
    optimizer.step()
    torch.testing.assert_close(matrix.data, torch.tensor([[1.9 - 0.1, 1.9 + 0.1]]))
    torch.testing.assert_close(vector.data, torch.tensor([1.9, 2.1]))


def test_a_group_without_parameters_is_left_out():
    optimizer = build_adamw([("w", nn.Parameter(torch.zeros(2, 2)))], **KEYS)
    assert [group["name"] for group in optimizer.param_groups] == ["decay"]


def test_unusable_parameters_are_named():
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(PlanError, match="no parameter to train"):
        build_adamw([], **KEYS)
    with pytest.raises(PlanError, match=r"same tensor as a\.weight\n  where: b\.weight"):
        build_adamw([("a.weight", weight), ("b.weight", weight)], **KEYS)
    with pytest.raises(PlanError, match=r"given twice\n  where: a\.weight"):
        build_adamw([("a.weight", weight), ("a.weight", nn.Parameter(torch.zeros(2)))], **KEYS)
    with pytest.raises(PlanError, match=r"frozen parameter .*\n  where: a\.weight"):
        build_adamw([("a.weight", nn.Parameter(torch.zeros(2), requires_grad=False))], **KEYS)
    with pytest.raises(PlanError, match=r"bfloat16, not an FP32 master"):
        build_adamw([("a.weight", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))], **KEYS)
