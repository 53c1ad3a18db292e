"""Arguments that several verbs share, so that they read alike everywhere. May import: nothing of Quaver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONFIG = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A run's YAML file, see configs/.", show_default=False)
]
OVERRIDES = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.PATH=VALUE",
        help="Any key of the config, changed: optimizer.lr=5e-4. The last one wins.",
        show_default=False,
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout, and nothing else.")]
