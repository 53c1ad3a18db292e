"""The step that users run today: transformers' model in BF16 as it ships, its own loss, torch's AdamW as it ships.

No setting of it is touched: SDPA and the experts are those that transformers chooses, AdamW is the one that
`torch.optim.AdamW(parameters)` gives. May import: transformers, models (the config), data (the batch).
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant
from quaver.data import Batch
from quaver.models import load_hf_config


def stock_step(sizes: Sizes, batch: Batch, *, lr: float, clip_norm: float) -> Contestant:
    """Forward with loss, backward, clipping and update of the same model on the same tokens."""
    config = load_hf_config("deepseek_v3", sizes.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step() -> None:
        # transformers shifts the labels itself
        model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
