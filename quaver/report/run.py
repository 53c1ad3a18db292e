"""A run's folder as a report reads it: metrics, and the files beside them where they are there.

config.yaml, environment.json, replacement.json and ledger.json may be missing (a run that ended early); a
file that is there and broken is an error that names it. May import: config, errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quaver.config.document import parse_yaml
from quaver.errors import ConfigError
from quaver.report.metrics import Metrics, read_metrics, require_run_folder

GEMMS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class GemmCount:
    """Executed GEMMs of one format and kind, by gemm; `recomputed` are extra fprops of recomputation."""

    format: str
    kind: str
    executed: Mapping[str, int]
    recomputed: int


@dataclass(frozen=True)
class LedgerSummary:
    """What ledger.json adds up to: the recipe (None: low precision off), and whether the ledger agreed."""

    recipe: str | None
    ok: bool
    counts: tuple[GemmCount, ...]
    idle_experts: int


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: what it is called on the page, unique there.
        folder: where it lies.
        metrics: its lines.
        config: dotted key -> value as text; None if there is no config.yaml.
        config_text: config.yaml as it stands.
        environment: dotted key -> value as text; None if there is no environment.json.
        parameters: number of parameters, if environment.json says so.
        recipe: of low precision, or the compute dtype without it, if either is known.
        replacements: pattern -> number of modules hit; None if there is no replacement.json.
        ledger: None if there is no ledger.json.
    """

    name: str
    folder: Path
    metrics: Metrics
    config: Mapping[str, str] | None
    config_text: str | None
    environment: Mapping[str, str] | None
    parameters: int | None
    recipe: str | None
    replacements: Mapping[str, int] | None
    ledger: LedgerSummary | None


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Reads each folder; runs of the same name are told apart by as much of their path as it takes.

    Raises:
        ConfigError: no folder at all, one given twice, or one that is no readable run.
    """
    if not folders:
        raise ConfigError("no run was given", where="report", remedy="give one or more run folders")
    resolved = [require_run_folder(folder).resolve() for folder in folders]
    for path, count in Counter(resolved).items():
        if count > 1:
            raise ConfigError("the same run is given twice", where=str(path), remedy="give each run once")
    return [_read_run(name, path) for name, path in zip(_names(resolved), resolved)]


def _names(paths: Sequence[Path]) -> list[str]:
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _read_run(name: str, folder: Path) -> Run:
    metrics = read_metrics(folder)
    config_text = _text(folder / "config.yaml")
    config = parse_yaml(config_text, str(folder / "config.yaml")).data if config_text is not None else None
    environment = _json(folder / "environment.json", dict)
    ledger = _json(folder / "ledger.json", dict)
    replacement = _json(folder / "replacement.json", (dict, list))
    summary = _ledger(ledger, folder / "ledger.json") if ledger is not None else None
    parameters = environment.get("parameters") if environment else None
    return Run(
        name=name,
        folder=folder,
        metrics=metrics,
        config=dict(flatten(config)) if config is not None else None,
        config_text=config_text,
        environment=dict(flatten(environment)) if environment is not None else None,
        parameters=parameters if isinstance(parameters, int) else None,
        recipe=_recipe(config, environment, summary),
        replacements=_replacements(replacement, folder / "replacement.json")
        if replacement is not None
        else None,
        ledger=summary,
    )


def flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value as text of each leaf; a list is one leaf unless it holds mappings."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(data, list) and any(isinstance(item, Mapping) for item in data):
        for index, value in enumerate(data):
            yield from flatten(value, f"{prefix}[{index}]")
    else:
        yield prefix, data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, default=str)


def _recipe(config: Any, environment: Mapping[str, Any] | None, ledger: LedgerSummary | None) -> str | None:
    for recipe in (ledger.recipe if ledger else None, (environment or {}).get("recipe")):
        if isinstance(recipe, str):
            return recipe
    if ledger is None and environment is None:
        return None
    model = config.get("model") if isinstance(config, Mapping) else None
    dtype = model.get("torch_dtype") if isinstance(model, Mapping) else None
    return dtype if isinstance(dtype, str) else None


def _ledger(document: Mapping[str, Any], path: Path) -> LedgerSummary:
    executed: Counter[tuple[str, str, str]] = Counter()
    recomputed: Counter[tuple[str, str]] = Counter()
    entries, idle = document.get("entries"), document.get("idle_experts", [])
    ok = document.get("ok")
    if not isinstance(entries, list) or not isinstance(idle, list) or not isinstance(ok, bool):
        _refuse(path, "it is not of the form of a ledger")
    for entry in entries:
        known = entry if isinstance(entry, Mapping) else {}
        keys = [known.get(key) for key in ("format", "kind", "gemm")]
        counts = [known.get("count"), known.get("recomputed", 0)]
        if not all(isinstance(k, str) for k in keys) or not all(isinstance(c, int) for c in counts):
            _refuse(path, "an entry of the ledger is not of its form")
        form, kind, gemm = map(str, keys)
        executed[form, kind, gemm] += counts[0]
        recomputed[form, kind] += counts[1]
    groups = sorted({(form, kind) for form, kind, _ in executed})
    counts_by_group = tuple(
        GemmCount(form, kind, {gemm: executed[form, kind, gemm] for gemm in GEMMS}, recomputed[form, kind])
        for form, kind in groups
    )
    recipe = document.get("recipe")
    return LedgerSummary(str(recipe) if recipe is not None else None, ok, counts_by_group, len(idle))


def _replacements(document: Any, path: Path) -> dict[str, int]:
    rows = document.get("replacements") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        _refuse(path, "it holds no list of replacements")
    hits: Counter[str] = Counter()
    for row in rows:
        if not isinstance(row, Mapping) or not isinstance(row.get("hits"), list) or "pattern" not in row:
            _refuse(path, "a replacement is not of its form")
        hits[str(row["pattern"])] += len(row["hits"])
    return dict(hits)


def _text(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _refuse(path, f"it cannot be read: {error}")


def _json(path: Path, kinds: type | tuple[type, ...]) -> Any:
    text = _text(path)
    if text is None:
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"it is not JSON: {error}")
    if not isinstance(document, kinds):
        _refuse(path, "it is not of the expected form")
    return document


def _refuse(path: Path, why: str) -> NoReturn:
    raise ConfigError(
        f"a file of the run is broken: {why}",
        where=str(path),
        remedy="restore the file, or remove it to do without",
    )
