"""Reports: one self-contained HTML page over the folders of one or several runs.

`metrics.py` reads metrics.jsonl (the one reader of that file), `run.py` the rest of a run's folder,
`scale.py`, `thin.py` and `chart.py` turn numbers into SVG geometry, `tables.py` into rows, and `page.py`
renders the templates. The folders may come from anyone: nothing in them is executed, and all of their text is
escaped. May import: config, errors.
"""

from __future__ import annotations

from quaver.report.metrics import Metrics, Sample, SampleLine, TrainingLine, ValidationLine, read_metrics
from quaver.report.page import render_report

__all__ = [
    "Metrics",
    "Sample",
    "SampleLine",
    "TrainingLine",
    "ValidationLine",
    "read_metrics",
    "render_report",
]
