"""Lines of metrics.jsonl as `quaver train` writes them, with numbers that are known."""


def training_line(step, **changed):
    """A training line of `step`, some of its fields changed."""
    line = {
        "step": step,
        "loss": 4.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 64 * step,
        "tokens_per_s": 100.0,
    }
    return line | {"skipped": 0} | changed


def validation_line(step, loss, bpb=1.0):
    """A validation line of `step`."""
    return {"step": step, "val_loss": loss, "val_bpb": bpb}
