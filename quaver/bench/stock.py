"""The steps that users run today: transformers' model as it ships, its own loss, torch's AdamW as it ships.

BF16 comes in two ways: weights that are BF16 themselves, the faster one, which drops updates below their last bit;
and FP32 weights under autocast, which is what a Trainer with `bf16=True` does, and what keeps masters as we do.
No setting is touched: SDPA and the experts are those that transformers chooses, AdamW is the one that
`torch.optim.AdamW(parameters)` gives. May import: transformers, models (the config), data (the batch).
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from quaver.bench.sizes import Sizes
from quaver.bench.timing import Contestant
from quaver.data import Batch
from quaver.models import load_hf_config


def stock_step(
    sizes: Sizes, batch: Batch, *, lr: float, clip_norm: float, autocast: bool = False
) -> Contestant:
    """Forward with loss, backward, clipping and update of the same model on the same tokens.

    Args:
        sizes: of the model.
        batch: its input_ids are the labels too.
        lr: learning rate.
        clip_norm: largest gradient norm.
        autocast: FP32 weights under BF16 autocast; else BF16 weights.
    """
    config = load_hf_config("deepseek_v3", sizes.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if autocast else torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step() -> None:
        # transformers shifts the labels itself
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
