"""SIGKILL at random moments, many of them within a save: every run goes on from its last whole checkpoint and ends
with the bits of the unbroken run.

A minute of it runs always; 30 kills are `make test-faults`. Run with -s to see what each kill has met.
"""

from __future__ import annotations

import os
import random

import pytest
import yaml
from helpers.micro import micro_document
from helpers.saved import checkpoint_of, differing, metric_lines, saved_state, saved_tensors
from killed_runs import Killed, Run

STEPS = 20


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    document = micro_document("mxfp8", str(corpus), str(root / "cache"))
    document["training"] |= {"steps": STEPS, "validate_every": 5}
    document["checkpoint"] = {"every": 1}
    document["optimizer"]["schedule"] = {"kind": "linear", "warmup_steps": 4}
    file = root / "micro.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@pytest.fixture(scope="module")
def unbroken(config):
    run = Run(config, config.parent / "unbroken")
    run.finish(resume=False)
    return run


def chain(config, name: str, draw: random.Random, aims: list[tuple[str, bool]]) -> tuple[Run, list[Killed]]:
    """One run, killed once for each aim and then trained to its end; each start goes on where it should."""
    run, kills, expected = Run(config, config.parent / name), [], 0
    for index, (aim, asynchronous) in enumerate(aims):
        kills.append(run.kill(draw, aim, resume=index > 0, asynchronous=asynchronous))
        print(f"{name}.{index}: {kills[-1]}", flush=True)
        assert run.resumed_from() == expected, kills
        assert kills[-1].newest >= expected
        # a synchronous save is whole before the next step begins; one in flight may be lost, and one more step
        assert kills[-1].steps - kills[-1].newest <= (2 if asynchronous else 1) + 1, kills
        expected = kills[-1].newest
    run.finish(resume=True)
    assert run.resumed_from() == expected, kills
    return run, kills


def check_ends_equal(run: Run, unbroken: Run) -> None:
    assert metric_lines(run.out) == metric_lines(unbroken.out)
    mine, other = (checkpoint_of(r.out, STEPS) for r in (run, unbroken))
    assert differing(saved_tensors(mine), saved_tensors(other)) == []
    for key in ("progress", "loader", "step"):
        assert saved_state(mine)[key] == saved_state(other)[key]
    assert not list(run.checkpoints.glob("*.tmp-*"))
    assert (run.checkpoints / "latest").read_text().strip() == mine.name


@pytest.mark.slow
def test_a_run_killed_three_times_ends_with_the_same_bits(config, unbroken) -> None:
    aims = [("save", False), ("anywhere", False), ("save", True)]
    run, kills = chain(config, "short", random.Random(3), aims)
    check_ends_equal(run, unbroken)
    assert any(kill.in_save for kill in kills), kills


@pytest.mark.skipif(not os.environ.get("QUAVER_FAULTS"), reason="part of `make test-faults`")
def test_thirty_kills(config, unbroken) -> None:
    draw, kills = random.Random(2024), []
    for number in range(15):
        asynchronous = number % 2 == 1
        aims = [("save", asynchronous), (("anywhere", "save")[number % 3 == 0], asynchronous)]
        run, more = chain(config, f"chain-{number:02}", draw, aims)
        check_ends_equal(run, unbroken)
        kills += more
    within = [kill for kill in kills if kill.in_save]
    print(f"{len(kills)} kills, {len(within)} between the first byte of a save and its rename", flush=True)
    assert len(kills) == 30
    assert len(within) >= 10
    assert {kill.asynchronous for kill in within} == {True, False}
