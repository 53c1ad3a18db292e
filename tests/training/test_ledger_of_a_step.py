"""The ledger against an independent witness: a dispatch mode that sees every aten GEMM of a training step."""

import json
from collections import Counter

import pytest
import torch
from helpers.tracing import GEMM_OPS
from test_equalities import batches, build
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.errors import LedgerError
from quaver.low_precision import LowPrecisionLinear
from quaver.training import train
from quaver.training.step import train_step

LINEARS_A_LAYER = 4  # MLA projections of one layer


class Witness(TorchDispatchMode):
    """Every aten GEMM: the site of the backend call that it is inside of, or its sizes where it is outside."""

    def __init__(self, ledger) -> None:
        super().__init__()
        self.ledger, self.inside, self.outside = ledger, Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in GEMM_OPS:
            site = self.ledger.active
            if site is None:
                left, right = [a for a in args if isinstance(a, torch.Tensor) and a.ndim >= 2][-2:]
                self.outside[tuple(sorted((*left.shape, right.shape[-1])))] += 1
            else:
                self.inside[site.fqn, site.gemm] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_every_gemm_is_inside_a_backend_call_or_named_as_high_precision(micro, fmt: str) -> None:
    assembly = build(micro(fmt))
    sample = batches(micro(fmt), 1)
    with Witness(assembly.ledger) as witness:
        train_step(assembly, sample, lr=1e-3, clip_norm=1.0)
    dense = {site.fqn for site in assembly.sites() if site.kind == "dense"}
    counted = Counter()
    for (fqn, _, gemm, *_), count in assembly.ledger.executed.items():
        counted[fqn, gemm] += count
    # dense: one aten GEMM each; grouped: one for each expert that had tokens
    for fqn in dense:
        for gemm in ("fprop", "dgrad", "wgrad"):
            assert witness.inside[fqn, gemm] == counted[fqn, gemm] == 1
    for site in assembly.sites():
        if site.kind == "grouped":
            tokens = assembly.ledger.expert_tokens[site.fqn.rpartition(".")[0]]
            busy = sum(n > 0 for n in tokens)
            for gemm in ("fprop", "dgrad", "wgrad"):
                assert witness.inside[site.fqn, gemm] == busy
                assert counted[site.fqn, gemm] == 1
    assert set(witness.inside) == set(counted)
    # outside: the head and each router, three GEMMs each (fprop, dgrad, wgrad); attention is SDPA, embedding a gather
    config = assembly.hf_config
    T, H = sample[0].input_ids.numel(), config.hidden_size
    routers = config.num_hidden_layers - config.first_k_dense_replace
    head = tuple(sorted((T, H, config.vocab_size)))
    router = tuple(sorted((T, H, config.n_routed_experts)))
    assert witness.outside == {head: 3, router: 3 * routers}


def test_the_witness_sees_the_experts_of_the_high_precision_model(micro) -> None:
    """Of a run in BF16 it sees every GEMM outside: linear layers, head and routers, and the experts' grouped ones."""
    assembly = build(micro("bf16"))
    with Witness(assembly.ledger) as witness:
        train_step(assembly, batches(micro("bf16"), 1), lr=1e-3, clip_norm=1.0)
    assert not witness.inside
    linears = 3 * LINEARS_A_LAYER + 3 + 2 * 3  # of MLA, the dense layer and the shared experts
    # head and routers; the experts' two GEMMs are one grouped call each
    assert witness.outside.total() == 3 * (linears + 1 + 2 + 2 * 2)


def test_a_gemm_around_the_backend_ends_the_run(micro, tmp_path, monkeypatch) -> None:
    def detour(self, input):
        weight = self.weight.select("row")
        from quaver.formats import mxfp8

        return torch.nn.functional.linear(input, mxfp8.dequantize(weight.data, weight.scale).to(input.dtype))

    original = LowPrecisionLinear.forward

    def forward(self, input):
        return (detour if self.fqn == "model.layers.1.self_attn.o_proj" else original)(self, input)

    monkeypatch.setattr(LowPrecisionLinear, "forward", forward)
    with pytest.raises(LedgerError, match=r"model\.layers\.1\.self_attn\.o_proj") as raised:
        train(micro("mxfp8"), out=tmp_path / "run")
    assert raised.value.exit_code == 3
    document = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert document["ok"] is False


def test_one_wgrad_around_the_backend_is_found(micro, tmp_path, monkeypatch) -> None:
    import quaver.low_precision.dense as dense

    original = dense._DenseGemms.backward

    def backward(ctx, g):
        if ctx.fqn != "model.layers.2.self_attn.q_proj":
            return original(ctx, g)
        backend = ctx.recipe.backend
        real = backend.low_precision_matmul

        def around(left, right, *, layout, output_dtype, site):
            if layout != "TN":
                return real(left, right, layout=layout, output_dtype=output_dtype, site=site)
            wish = backend.codec(left.format)
            a, b = wish.factors(left, torch.float32), wish.factors(right, torch.float32)
            return (a.values.t() @ b.values).to(output_dtype)

        monkeypatch.setattr(backend, "low_precision_matmul", around, raising=False)
        try:
            return original(ctx, g)
        finally:
            monkeypatch.setattr(backend, "low_precision_matmul", real, raising=False)

    monkeypatch.setattr(dense._DenseGemms, "backward", staticmethod(backward))
    with pytest.raises(LedgerError, match="q_proj wgrad"):
        train(micro("mxfp8"), out=tmp_path / "run")


def test_ledger_of_a_whole_run(micro, tmp_path) -> None:
    train(micro("hif8", "gradient_accumulation_steps=3"), out=tmp_path / "run")
    document = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert document["ok"] is True
    assert document["recipe"] == "hif8/current@1"
    counts = {(e["fqn"], e["gemm"]): e["count"] for e in document["entries"]}
    assert set(counts.values()) == {12}  # 4 steps of 3 micro-steps
    assert len({e["fqn"] for e in document["entries"]}) == 3 * LINEARS_A_LAYER + 3 + 2 * 3 + 2 * 2


def test_low_precision_off_writes_an_empty_ledger(micro, tmp_path) -> None:
    train(micro("bf16"), out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "ledger.json").read_text()) == {
        "recipe": None,
        "ok": True,
        "entries": [],
        "idle_experts": [],
    }
