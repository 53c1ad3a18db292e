import json
import math

import pytest
from run_lines import training_line, validation_line

from quaver.errors import ConfigError
from quaver.report import Sample, SampleLine, TrainingLine, ValidationLine, read_metrics


def test_lines_are_typed_and_told_apart(make_run):
    run = make_run(
        "run",
        [
            validation_line(0, 6.0, 8.5),
            {"step": 0, "samples": [{"prompt": "def ", "text": "f():"}]},
            training_line(1, loss=5.5, grad_norm=2, lr=1e-4, tokens=64, tokens_per_s=321.5),
            training_line(2, skipped=1),
            {"step": 2, "router_load": [1, 2]},
        ],
    )
    metrics = read_metrics(run)
    assert metrics.training[0] == TrainingLine(1, 5.5, 2.0, 1e-4, 64, 321.5, 0)
    assert metrics.validation == (ValidationLine(0, 6.0, 8.5),)
    assert metrics.samples == (SampleLine(0, (Sample("def ", "f():"),)),)
    assert (metrics.steps, metrics.skipped, metrics.repeated, metrics.other) == (2, 1, 0, 1)


def test_non_finite_numbers_are_the_strings_and_are_counted(make_run):
    lines = [
        training_line(1, loss="nan", grad_norm="inf"),
        training_line(2, loss="-inf"),
        validation_line(2, "nan"),
    ]
    metrics = read_metrics(make_run("run", lines))
    assert math.isnan(metrics.training[0].loss)
    assert metrics.training[0].grad_norm == math.inf
    assert metrics.training[1].loss == -math.inf
    assert metrics.non_finite == 4


def test_the_last_line_of_a_step_wins_and_steps_are_in_order(make_run):
    lines = [training_line(step, loss=float(step)) for step in (1, 2, 3)] + [validation_line(2, 9.0)]
    lines += [training_line(2, loss=20.0), training_line(3, loss=30.0), validation_line(2, 8.0)]
    metrics = read_metrics(make_run("run", lines))
    assert [(line.step, line.loss) for line in metrics.training] == [(1, 1.0), (2, 20.0), (3, 30.0)]
    assert metrics.validation == (ValidationLine(2, 8.0, 1.0),)
    assert metrics.repeated == 3


@pytest.mark.parametrize(
    ("second_line", "what"),
    [
        ('{"step": 2, "loss": 1.0', "not JSON"),
        ('{"step": 2, "loss": NaN}', "NaN is no JSON number"),
        ("[1, 2]", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"loss": 1.0}', "lacks 'step'"),
        ('{"step": 2, "loss": 1.0}', "lacks 'grad_norm'"),
        ('{"step": 2.5, "val_loss": 1.0, "val_bpb": 1.0}', "'step' is 2.5"),
        ('{"step": -1, "val_loss": 1.0, "val_bpb": 1.0}', "'step' is -1"),
        ('{"step": true, "val_loss": 1.0, "val_bpb": 1.0}', "'step' is True"),
        ('{"step": 2, "val_loss": "NaN", "val_bpb": 1.0}', "'val_loss' is 'NaN'"),
        ('{"step": 2, "val_loss": null, "val_bpb": 1.0}', "'val_loss' is None"),
        ('{"step": 2, "val_loss": 1' + "0" * 400 + ', "val_bpb": 1.0}', "too large"),
        ('{"step": 2, "samples": "def"}', "not a list"),
        ('{"step": 2, "samples": [{"prompt": "def"}]}', "sample is not of the form"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_line(make_run, second_line, what):
    run = make_run("run", [], text=json.dumps(training_line(1)) + "\n" + second_line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_metrics(run)
    assert what in caught.value.what
    assert caught.value.where == f"{run}/metrics.jsonl:2"
    assert len(str(caught.value)) < 500


def test_folders_that_are_no_runs(tmp_path, make_run):
    with pytest.raises(ConfigError, match="no such run folder"):
        read_metrics(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a run is a folder"):
        read_metrics(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path / "folder")
    with pytest.raises(ConfigError, match="no metrics yet"):
        read_metrics(make_run("empty", []))
    with pytest.raises(ConfigError, match="no metrics yet"):
        read_metrics(make_run("samples_only", [{"step": 0, "samples": []}]))
    binary = make_run("binary", [])
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_metrics(binary)


def test_an_unfinished_last_line_is_left_out_and_told(make_run):
    """A killed run ends in the middle of a line, even of a character; a whole line without newline counts."""
    whole = json.dumps(training_line(1)) + "\n"
    second = json.dumps(training_line(2))
    for rest, steps, cut in ((second[:30], 1, True), (second, 2, False), ("", 1, False)):
        metrics = read_metrics(make_run(f"run-{len(rest)}", [], text=whole + rest))
        assert (metrics.steps, metrics.cut) == (steps, cut)
    run = make_run("character", [])
    (run / "metrics.jsonl").write_bytes(whole.encode() + b'{"step": 2, "samples": [{"prompt": "\xc3')
    assert read_metrics(run).cut
    with pytest.raises(ConfigError, match="not JSON"):  # in the middle it stays an error
        read_metrics(make_run("middle", [], text=whole + second[:30] + "\n" + second + "\n"))
