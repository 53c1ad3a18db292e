"""A second Ctrl-C ends a run at once, also while a save is being written beside the training."""

import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers.micro import micro_document, write_corpus

SCRIPT = """
import sys, time
import quaver.checkpoint.manager as manager
def slow(*_):
    print("saving", flush=True)
    time.sleep(300)
manager.finish_writing = slow
from quaver.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_it_does_not_wait_for_a_save_in_flight(tmp_path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    document = micro_document("bf16", str(write_corpus(corpus)), str(tmp_path / "cache"))
    document["training"]["steps"] = 100_000
    document["checkpoint"] = {"every": 2, "asynchronous": True}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-c", SCRIPT, "train", str(file), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        try:
            assert run.stdout.readline() == "saving\n"
            run.send_signal(signal.SIGINT)
            time.sleep(1)
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 130
        finally:
            run.kill()
        said = run.stderr.read()
    assert f"stopped: {tmp_path / 'run'} is incomplete" in said.replace("\n", "")
