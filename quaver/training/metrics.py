"""metrics.jsonl: the one source of truth of a run; TensorBoard, plots and reports are fed from its lines.

May import: disk, errors.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

from quaver.errors import CapabilityError
from quaver.training.disk import writing


def encode_number(value: Any) -> Any:
    """JSON has no non-finite numbers: they become the strings "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


class MetricsWriter:
    """Appends one JSON object a line, unbuffered, so that a killed run keeps every finished step.

    Raises:
        RunFolderError: the system refused, for instance because the disk is full. What was written of the line is
            cut off by a resume.
    """

    def __init__(self, path: Path | None, tensorboard_dir: Path | None = None) -> None:
        self._path = path
        self._file = None
        if path is not None:
            with writing(path):
                self._file = path.open("ab", buffering=0)
        self._board = _summary_writer(tensorboard_dir) if tensorboard_dir is not None else None

    def write(self, line: dict[str, Any]) -> None:
        """Writes one line; numbers go to TensorBoard as well where it is on."""
        if self._file is None or self._path is None:
            return
        encoded = {key: encode_number(value) for key, value in line.items()}
        rest = memoryview((json.dumps(encoded, ensure_ascii=False) + "\n").encode())
        with writing(self._path):
            while rest:
                rest = rest[self._file.write(rest) :]
        if self._board is not None:
            for key, value in line.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, line["step"])

    def close(self) -> None:
        """Closes the file and the board."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def require_tensorboard() -> None:
    """CapabilityError where TensorBoard is not installed; nothing is imported."""
    if importlib.util.find_spec("tensorboard") is None:
        raise CapabilityError(
            "tensorboard is not installed",
            where="training.tensorboard",
            remedy="pip install 'quaver[tensorboard]'",
        )


def _summary_writer(folder: Path) -> Any:
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
