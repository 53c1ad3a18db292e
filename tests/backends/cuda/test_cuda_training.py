"""Whole training steps through the CUDA adapter on CPU tensors: the reference's losses, but for the order of sums."""

from __future__ import annotations

import json

import pytest
from helpers import cuda_witness
from helpers.micro import micro_document, write_corpus

import quaver
from quaver.backends.cuda import CudaFacts, device


@pytest.fixture
def losses(tmp_path, monkeypatch):
    cuda_witness.install(monkeypatch)
    facts = CudaFacts("NVIDIA B200", (10, 0), {"torch": "2.13.0", "cuda": "12.9"}, device_type="cpu")
    monkeypatch.setattr(device, "probe", lambda: facts)
    (tmp_path / "corpus").mkdir()
    corpus = str(write_corpus(tmp_path / "corpus"))

    def run(backend):
        document = micro_document("mxfp8", corpus, str(tmp_path / "cache"))
        changes = ["training.steps=3", f"low_precision.backend={backend}"]
        folder = quaver.train(document, changes, out=tmp_path / backend).dir
        ledger = json.loads((folder / "ledger.json").read_text())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert ledger["ok"] is True
        return [line["loss"] for line in lines if "loss" in line], {e["kernel"] for e in ledger["entries"]}

    return run


def test_a_run(losses):
    found, kernels = losses("cuda")
    wanted, _ = losses("reference")
    assert kernels == {"scaled_mm", "scaled_grouped_mm"}
    assert found == pytest.approx(wanted, rel=1e-3)
    assert found[0] != found[-1]
