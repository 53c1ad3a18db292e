"""state_dict holds plain FP32 tensors under the source's keys; loading writes the master and refreshes the codes."""

from __future__ import annotations

import pytest
import torch
from helpers.policies import FLOOR, FORMATS, HIF8, linear, mlp, policy
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from quaver.errors import StaleWeightError
from quaver.low_precision import MasterWeight, quantised_weights


def x():
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def plain_twin():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_it_is_the_state_dict_of_the_plain_model(recipe_id):
    """Keys, order, shapes, dtypes, types and bits; no codes, no scales, no wrapper."""
    found, wanted = mlp(policy(recipe_id)).state_dict(), plain_twin().state_dict()
    assert list(found) == list(wanted)
    for key, tensor in found.items():
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert torch.equal(tensor, wanted[key])


def test_keep_vars_hands_out_the_parameters():
    model = mlp(policy(FLOOR))
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is model[0].weight
    assert kept["0.bias"] is model[0].bias


def test_it_can_be_taken_in_inference_mode():
    model = mlp(policy(FLOOR))
    with torch.inference_mode():
        found = model.state_dict()
    assert torch.equal(found["0.weight"], model[0].weight.master)


def torch_round_trip(model, path):
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def safetensors_round_trip(model, path):
    save_file(model.state_dict(), path)
    return load_file(path)


@pytest.mark.parametrize("round_trip", [torch_round_trip, safetensors_round_trip])
@pytest.mark.parametrize("recipe_id", FORMATS)
def test_a_file_and_back(recipe_id, round_trip, tmp_path):
    model = mlp(policy(recipe_id), seed=3)
    with torch.no_grad():
        model[0].weight.mul_(1.5)  # a stale weight is saved as it is: the master is what counts
    loaded = round_trip(model, tmp_path / "weights")
    assert {type(t) for t in loaded.values()} == {torch.Tensor}
    other = mlp(policy(recipe_id), seed=4)
    before = other(x())
    assert other.load_state_dict(loaded) == nn.Module().load_state_dict({})  # all keys match
    for (_, a), (_, b) in zip(quantised_weights(model).values(), quantised_weights(other).values()):
        assert torch.equal(a.master, b.master)
        b.refresh()
        a.refresh()
    assert torch.equal(model(x()), other(x()))
    assert not torch.equal(before, other(x()))
    plain = plain_twin()
    plain.load_state_dict(loaded)
    assert torch.equal(plain[0].weight, model[0].weight.master)


def test_safetensors_whole_models(tmp_path):
    model, other = mlp(policy(HIF8), seed=3), mlp(policy(HIF8), seed=4)
    save_model(model, str(tmp_path / "m.safetensors"))
    load_model(other, str(tmp_path / "m.safetensors"))
    assert torch.equal(model(x()), other(x()))


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_loading_refreshes_and_keeps_the_parameter(recipe_id):
    model, source = mlp(policy(recipe_id)), mlp(policy(recipe_id), seed=9)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict(source.state_dict())
    assert all(a is b for a, b in zip(parameters, model.parameters()))
    assert torch.equal(model(x()), source(x()))
    assert [local.state.refreshes for _, local in quantised_weights(model).values()] == [
        0,
        0,
    ]  # no step was made
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    mine = {model[0].weight.master.data_ptr()}
    assert source[0].weight.master.data_ptr() not in mine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_converted_into_the_fp32_master(dtype):
    """Codes always come from the FP32 master, never from the copy that was loaded."""
    model, given = (
        mlp(policy(FLOOR)),
        {k: v.to(dtype) for k, v in mlp(policy(FLOOR), seed=9).state_dict().items()},
    )
    model.load_state_dict(given)
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight.master, given["0.weight"].float())
    assert torch.equal(model[0](x()), linear(FLOOR, given["0.weight"].float(), given["0.bias"].float())(x()))


def test_codes_are_refused_as_weights():
    model = mlp(policy(FLOOR))
    given = model.state_dict() | {"2.weight": torch.zeros(64, 96, dtype=torch.uint8)}
    with pytest.raises(StaleWeightError, match=r"(?s)torch\.uint8.*where: 2\.weight.*logical weights"):
        model.load_state_dict(given)


def test_assigning_is_refused_and_leaves_the_weight():
    model = mlp(policy(FLOOR))
    before = model(x())
    given = {k: v + 1 for k, v in model.state_dict().items()}
    with pytest.raises(StaleWeightError, match=r"(?s)assign=True.*where: 0\.weight.*load without assign"):
        model.load_state_dict(given, assign=True)
    assert isinstance(model[0].weight, MasterWeight)
    assert torch.equal(model(x()), before)


def test_missing_and_unexpected_keys_and_shapes_are_torchs_errors():
    model = mlp(policy(FLOOR))
    given = model.state_dict()
    del given["0.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict(given)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(given | {"0.weight": torch.zeros(96, 65)})
    assert not model[0].weight.stale
    assert model.load_state_dict(given, strict=False).missing_keys == ["0.weight"]


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_optimizer_state_resumes_bit_for_bit(recipe_id, tmp_path):
    """Two steps, save, one step, against load and one step."""
    from quaver.low_precision import refresh_stale

    def step(model, optimizer, seed):
        data = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(data).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        refresh_stale(model, after_step=True)

    model = mlp(policy(recipe_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for seed in range(2):
        step(model, optimizer, seed)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint")
    step(model, optimizer, 2)
    weights, moments = torch.load(tmp_path / "checkpoint", weights_only=True)
    other = mlp(policy(recipe_id), seed=7)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(moments)
    step(other, resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    assert torch.equal(model(x()), other(x()))
