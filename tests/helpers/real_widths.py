"""The 16B configuration cut down to blocks 0 and 1 and 8 experts, at full hidden and expert widths."""

from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs" / "dsv3-16b"
REDUCED = [
    "model.spec=null",
    "model.config_overrides.num_hidden_layers=2",
    "model.config_overrides.n_routed_experts=8",
    "model.config_overrides.vocab_size=512",
    "data.tokenizer=byte",
    "data.seq_len=64",
    "fsdp_config.dp_shard_size=1",
    "gradient_accumulation_steps=1",
    "gradient_checkpointing.activation_checkpoint=off",
    "training.micro_batch_size=1",
    "training.steps=3",
    "training.validate_every=0",
    "training.validation_batches=1",
    "training.sample_tokens=0",
    "training.num_threads=2",
    "optimizer.lr=1e-4",
    "optimizer.schedule={kind: constant}",
]
