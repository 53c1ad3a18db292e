"""Hugging Face's Trainer drives a quantised Llama: it trains, saves and reloads, bit for bit like a hand loop."""

import accelerate  # noqa: F401  Trainer needs it: where it is missing these tests fail, and are not skipped
import pytest
import torch
from torch import nn

import quaver

RULE = quaver.ReplacementRule(
    [
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.v_proj",
        "model.layers.*.self_attn.o_proj",
        "model.layers.*.mlp.*_proj",
    ],
    nn.Linear,
    "low_precision_linear",
)
CONFIGS = {
    "mxfp8": quaver.LowPrecisionConfig(enabled=True),
    "hif8": quaver.LowPrecisionConfig(enabled=True, format="hif8", scaling="current"),
}
STEPS = 4


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def examples() -> list[dict]:
    ids = torch.randint(0, 128, (STEPS * 2, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def hand_losses(fmt: str, order: list[list[int]]) -> list[float]:
    model = llama()
    quaver.quantize_modules(model, CONFIGS[fmt], plan=[RULE])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quaver.attach(optimizer, model)
    rows, losses = examples(), []
    for pair in order:
        ids = torch.stack([rows[i]["input_ids"] for i in pair])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mxfp8", "hif8"])
def test_trainer_trains_saves_and_reloads(fmt: str, tmp_path) -> None:
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    model = llama()
    quantised = quaver.quantize_modules(model, CONFIGS[fmt], plan=[RULE])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    quaver.attach(optimizer, model)
    order: list[list[int]] = []
    losses: list[float] = []
    rows = examples()
    keys = {tuple(row["input_ids"].tolist()): i for i, row in enumerate(rows)}

    class Recording(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            order.append([keys[tuple(ids.tolist())] for ids in inputs["input_ids"]])
            loss = super().training_step(model, inputs, *args, **kwargs)
            losses.append(loss.item())  # as it is: the log rounds it
            return loss

    arguments = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        learning_rate=1e-3,
        dataloader_num_workers=0,
    )
    trainer = Recording(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    assert set(quantised.refresh_counts.values()) == {STEPS}
    assert len(quantised.refresh_counts) == 14
    by_hand = hand_losses(fmt, order)
    assert losses == by_hand
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(by_hand, rel=1e-3)
    # what was saved is an ordinary checkpoint of the FP32 masters
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{STEPS}", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    quaver.quantize_modules(again, CONFIGS[fmt], plan=[RULE])
    probe = rows[0]["input_ids"].unsqueeze(0)
    model.eval()
    again.eval()
    assert torch.equal(model(input_ids=probe).logits, again(input_ids=probe).logits)


@pytest.mark.slow
def test_trainer_resumes_from_its_checkpoint(tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    def run(resume: bool):
        model = llama()
        quaver.quantize_modules(model, CONFIGS["mxfp8"], plan=[RULE])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        quaver.attach(optimizer, model)
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=examples(), optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2") if resume else None)
        return model.state_dict()

    whole, resumed = run(False), run(True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
