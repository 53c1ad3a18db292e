"""Training: one step, the loop around it, and the folder that it leaves. Start with step.py."""

from quaver.training.evaluate import Validation, continuation, validate
from quaver.training.events import Observer, RunResult, RunStart, Silent
from quaver.training.metrics import encode_number
from quaver.training.preflight import check_documents, dry_run
from quaver.training.run_folder import check_run_folder, create_run_folder, find_run_folder
from quaver.training.step import StepResult, scheduled_lr, token_nats, train_step
from quaver.training.trainer import Trainer, resolve, train

__all__ = [
    "Observer",
    "RunResult",
    "RunStart",
    "Silent",
    "StepResult",
    "Trainer",
    "Validation",
    "check_documents",
    "check_run_folder",
    "continuation",
    "create_run_folder",
    "dry_run",
    "encode_number",
    "find_run_folder",
    "resolve",
    "scheduled_lr",
    "token_nats",
    "train",
    "train_step",
    "validate",
]
