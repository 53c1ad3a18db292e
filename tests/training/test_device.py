"""Where a run computes: the CPU unless asked, what is asked for or an error, and never against its backend."""

import subprocess
import sys

import pytest
import torch

from quaver.errors import CapabilityError, ConfigError
from quaver.training import device as devices
from quaver.training import train
from quaver.training.device import training_device


def test_the_cpu_is_the_default_of_reference_and_off(micro) -> None:
    assert training_device(micro("bf16")) == torch.device("cpu")
    assert training_device(micro("hif8")) == torch.device("cpu")
    assert training_device(micro("hif8", "training.device=cpu")) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("fmt", ["bf16", "mxfp8"])
def test_cuda_that_is_not_there_is_told_before_a_folder_is_made(micro, tmp_path, fmt: str) -> None:
    with pytest.raises(CapabilityError, match="finds no cuda device") as raised:
        train(micro(fmt, "training.device=cuda"), out=tmp_path / "run")
    assert raised.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_npu_without_torch_npu_is_told(micro, tmp_path) -> None:
    with pytest.raises(CapabilityError, match="torch_npu cannot be imported"):
        train(micro("bf16", "training.device=npu"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_device_that_the_backend_cannot_use_is_refused(micro, monkeypatch) -> None:
    monkeypatch.setattr(devices, "backend_device", lambda *_: "npu")
    with pytest.raises(ConfigError, match=r"training\.device is cpu, but backend 'reference' computes on npu"):
        training_device(micro("mxfp8", "training.device=cpu"))


def test_each_rank_takes_its_own_device_and_one_too_many_is_refused(micro, monkeypatch) -> None:
    class Two:
        chosen = None

        @staticmethod
        def device_count() -> int:
            return 2

        @classmethod
        def set_device(cls, index: int) -> None:
            cls.chosen = index

    monkeypatch.setattr(devices, "device_module", lambda kind: Two)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert training_device(micro("bf16", "training.device=cuda")) == torch.device("cuda", 1)
    assert Two.chosen == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(CapabilityError, match="local rank 2 has no cuda device: this machine has 2"):
        training_device(micro("bf16", "training.device=cuda"))


def test_a_run_on_the_cpu_imports_no_device_package() -> None:
    script = (
        "import quaver.training.trainer, sys\n"
        "print([m for m in sys.modules if m.startswith(('torch_npu', 'quaver.backends.npu', 'quaver.backends.cuda'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
