"""Blocks 0 and 1 of the 16B configuration at full hidden and expert widths, with 8 experts kept, train on a CPU."""

import json
import math

import pytest
from helpers.real_widths import CONFIGS, REDUCED

from quaver.config import load_config
from quaver.training import train


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_two_real_blocks_train_three_steps(fmt: str, corpus, tmp_path, read_metrics) -> None:
    overrides = [*REDUCED, f"data.sources=[{{path: {corpus}}}]", f"data.cache_dir={tmp_path / 'cache'}"]
    run = train(load_config(CONFIGS / f"{fmt}.yaml", overrides), out=tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(run.dir) if "loss" in line]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert abs(losses[0] - math.log(512)) < 1.0
    assert losses[-1] != losses[0]
    ledger = json.loads((run.dir / "ledger.json").read_text())
    assert ledger["ok"] is True
    # 4 MLA projections a layer, 3 dense, 3 shared, and the experts' two parameters, each with three GEMMs
    assert len(ledger["entries"]) == (2 * 4 + 3 + 3 + 2) * 3
    assert {e["count"] for e in ledger["entries"]} == {3}
    hits = json.loads((run.dir / "replacement.json").read_text())
    assert {fqn for entry in hits for fqn in entry["hits"]} == {
        e["fqn"].removesuffix(".gate_up_proj").removesuffix(".down_proj")
        if "experts." in e["fqn"] and "shared" not in e["fqn"]
        else e["fqn"]
        for e in ledger["entries"]
    }
