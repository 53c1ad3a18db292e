"""What a library user's three lines import, seen from a process of their own."""

from __future__ import annotations

import subprocess
import sys

LINES = """
import logging, sys, torch, quaver
net = torch.nn.Sequential(torch.nn.Linear(32, 32))
rule = quaver.ReplacementRule("0", torch.nn.Linear, "low_precision_linear")
quaver.quantize_modules(net, quaver.LowPrecisionConfig(enabled=True), plan=[rule])
quaver.attach(torch.optim.AdamW(net.parameters()), net)
assert not [name for name in sys.modules if name.partition(".")[0] in ("transformers", "rich", "typer")]
assert logging.getLogger("torchao").filters, "the known noise is dropped here as on the command line"
import quaver.assembly
for name in quaver.assembly.__all__:
    assert getattr(quaver.assembly, name) is not None
"""


def test_a_plain_module_needs_no_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINES], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
