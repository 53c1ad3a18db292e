"""DeepSeek-V3's routed experts: Hugging Face's own module in, the same names, shapes and mathematics out."""

from __future__ import annotations

import pytest
import torch
from helpers.experts import routing_of
from helpers.oracle import sqnr_db
from helpers.policies import FLOOR, FORMATS, policy
from helpers.tracing import GemmTrace
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3MoE

from quaver.backends import PlannedSite
from quaver.errors import PlanError
from quaver.low_precision import planned_sites, quantize_weights
from quaver.models import DeepseekV3LowPrecisionExperts
from quaver.models.deepseek_v3_experts import replace_deepseek_v3_low_precision_experts

FQN = "model.layers.1.mlp.experts"
E, H, FFN = 4, 64, 48


def config(**overrides):
    return DeepseekV3Config(
        hidden_size=H, moe_intermediate_size=FFN, n_routed_experts=E, num_experts_per_tok=2, n_group=1, topk_group=1,
        n_shared_experts=1, norm_topk_prob=True, **overrides,
    )  # fmt: skip


def experts(**overrides):
    torch.manual_seed(0)
    module = DeepseekV3Experts(config(**overrides))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def replaced(recipe_id):
    source = experts()
    module = replace_deepseek_v3_low_precision_experts(source, fqn=FQN, policy=policy(recipe_id))
    quantize_weights(module)
    return module


def data(dtype=torch.bfloat16, counts=(9, 0, 13, 10)):
    torch.manual_seed(1)
    index = routing_of(list(counts), 2)
    return torch.randn(index.shape[0], H).to(dtype), index, torch.rand(index.shape)


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_it_computes_what_hugging_faces_module_computes(recipe_id):
    """Output and all four gradients against the FP32 module, within what eight bits cost (two quantised GEMMs)."""
    x, index, weights = data(torch.float32)
    outputs = []
    for module in (experts(), replaced(recipe_id)):
        leaf, combine = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(leaf, index, combine)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        grads = [leaf.grad, combine.grad, module.gate_up_proj.grad, module.down_proj.grad]
        outputs.append([y.detach(), *grads])
    for exact, found in zip(*outputs):
        assert exact.shape == found.shape
        assert 18 < sqnr_db(exact, found) < 40
    for grad in outputs[1][3:]:
        assert torch.equal(grad[1], torch.zeros_like(grad[1]))  # the expert without tokens


def test_names_shapes_and_attributes_are_the_sources():
    source = experts().eval()
    source.down_proj.requires_grad_(False)
    parameters, attributes = dict(source.named_parameters()), source.__dict__.keys()
    module = replace_deepseek_v3_low_precision_experts(source, fqn=FQN, policy=policy(FLOOR))
    assert isinstance(module, DeepseekV3Experts)
    assert isinstance(module, DeepseekV3LowPrecisionExperts)
    assert {name: id(p) for name, p in module.named_parameters()} == {k: id(p) for k, p in parameters.items()}
    assert module.training is False
    assert attributes - module.__dict__.keys() == set()
    quantize_weights(module)
    assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == {
        "gate_up_proj": (E, 2 * FFN, H),
        "down_proj": (E, H, FFN),
    }
    assert module.down_proj.requires_grad is False
    assert planned_sites(module) == [
        PlannedSite(f"{FQN}.gate_up_proj", "grouped", "mxfp8_e4m3", ("fprop", "wgrad")),
        PlannedSite(f"{FQN}.down_proj", "grouped", "mxfp8_e4m3", ("fprop",))  # frozen: no wgrad,
    ]


@pytest.mark.parametrize("recipe_id", FORMATS)
def test_inside_the_moe_block_every_expert_gemm_is_in_eight_bits(recipe_id):
    """Router and shared experts stay as they are; the routed ones run through the backend, and the ledger agrees."""
    torch.manual_seed(0)
    block = DeepseekV3MoE(config())
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    bound = policy(recipe_id)
    block.experts = replace_deepseek_v3_low_precision_experts(block.experts, fqn=FQN, policy=bound)
    quantize_weights(block)
    x = torch.randn(2, 8, H, requires_grad=True)
    with GemmTrace(bound.backend.ledger) as trace:
        block(x).pow(2).sum().backward()
    # router, gate, up, down of the shared expert: fprop, dgrad and wgrad each
    assert trace.seen.pop(None) == 4 * 3
    assert {site.fqn for site in trace.seen} == {f"{FQN}.gate_up_proj", f"{FQN}.down_proj"}
    bound.backend.ledger.check(planned_sites(block), micro_steps=1)
    assert block.gate.weight.grad is not None
    assert block.gate.weight.grad.abs().sum() > 0


def test_the_dtype_is_the_activations_or_autocasts():
    module = replaced(FLOOR)
    x, index, weights = data(torch.float32)
    assert module(x, index, weights).dtype is torch.float32
    low = module(x.bfloat16(), index, weights)
    assert low.dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x, index, weights), low)
    assert torch.equal(
        module(x.bfloat16(), index, weights.bfloat16().float()),
        module(x.bfloat16(), index, weights.bfloat16()),
    )
    with pytest.raises(PlanError, match=rf"(?s)float16 activations.*{FQN}"):
        module(x.half(), index, weights)


def test_another_activation_is_refused():
    with pytest.raises(PlanError, match=rf"(?s)not supported: experts with activation GELU.*{FQN}"):
        replace_deepseek_v3_low_precision_experts(experts(hidden_act="gelu"), fqn=FQN, policy=policy(FLOOR))


@pytest.mark.parametrize(
    ("flag", "value"),
    [("is_transposed", True), ("has_bias", True), ("has_gate", False), ("is_concatenated", False)],
)
def test_another_layout_is_refused(flag, value):
    source = experts()
    setattr(source, flag, value)
    with pytest.raises(PlanError, match=rf"(?s)experts whose {flag} is {value}, wanted {not value}.*{FQN}"):
        replace_deepseek_v3_low_precision_experts(source, fqn=FQN, policy=policy(FLOOR))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_another_shape_is_refused(name):
    source = experts()
    source._parameters[name] = nn.Parameter(source._parameters[name].detach().transpose(1, 2).contiguous())
    with pytest.raises(PlanError, match=rf"(?s)not supported: {name} of shape.*{FQN}"):
        replace_deepseek_v3_low_precision_experts(source, fqn=FQN, policy=policy(FLOOR))


def test_a_forward_before_the_weights_are_quantised_is_named():
    module = replace_deepseek_v3_low_precision_experts(experts(), fqn=FQN, policy=policy(FLOOR))
    with pytest.raises(
        PlanError, match=rf"(?s)before its weights were quantised.*{FQN}\.gate_up_proj is a Parameter"
    ):
        module(*data())
