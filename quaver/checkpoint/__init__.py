"""Checkpoints: torch's distributed checkpoint in a folder that is either whole or not there.

Reading order: views.py (what is saved), state.py, manager.py, publish.py (a save, step by step), dcp.py, index.py,
manifest.py, find.py (which one a run starts from), load.py.
"""

from quaver.checkpoint.find import Found, find_latest, is_checkpoint, locate, look_for
from quaver.checkpoint.load import Loaded, load, read_run
from quaver.checkpoint.manager import CheckpointManager
from quaver.checkpoint.manifest import Manifest, verify
from quaver.checkpoint.model_config import meaning_of
from quaver.checkpoint.publish import Phase
from quaver.checkpoint.ranks import Ranks
from quaver.checkpoint.state import Stateful, TrainState
from quaver.checkpoint.views import model_view, optimizer_view

__all__ = [
    "CheckpointManager",
    "Found",
    "Loaded",
    "Manifest",
    "Phase",
    "Ranks",
    "Stateful",
    "TrainState",
    "find_latest",
    "is_checkpoint",
    "load",
    "locate",
    "look_for",
    "meaning_of",
    "model_view",
    "optimizer_view",
    "read_run",
    "verify",
]
