"""Where a run computes: the device of its backend, or the one that `training.device` names; never a guess.

May import: backends, low_precision, distributed, config, errors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType

import torch

from quaver.backends import Ledger
from quaver.config import RunConfig
from quaver.errors import CapabilityError, ConfigError
from quaver.low_precision import FormatExtension, build_policy


def training_device(config: RunConfig, formats: Sequence[FormatExtension] = ()) -> torch.device:
    """This rank's device, made the current one of its kind.

    Args:
        config: the run's config; its backend's gate speaks first.
        formats: formats beside the built-in ones that the config may name.

    Raises:
        CapabilityError: the backend cannot run here, or there is no such device for this rank.
        ConfigError: `training.device` is not what the backend computes on.
    """
    wanted, own = config.training.device, backend_device(config, formats)
    if own is not None and wanted is not None and wanted != own:
        raise ConfigError(
            f"training.device is {wanted}, but backend {config.low_precision.backend!r} computes on {own} alone",
            where="training.device",
            remedy=f"remove it, or set it to {own}",
        )
    kind = own or wanted or "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    module = device_module(kind)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= module.device_count():
        raise CapabilityError(
            f"local rank {index} has no {kind} device: this machine has {module.device_count()}",
            where="training.device",
            remedy=f"start at most {module.device_count()} ranks here (--nproc, or torchrun --nproc-per-node)",
        )
    module.set_device(index)
    return torch.device(kind, index)


def backend_device(config: RunConfig, formats: Sequence[FormatExtension] = ()) -> str | None:
    """The one kind of device that the backend computes on; None: any, or low precision is off."""
    if not config.low_precision.enabled:
        return None
    return build_policy(config.low_precision, Ledger(), formats).backend.device_type


def device_module(kind: str) -> ModuleType:
    """torch.cuda or torch.npu, with a device behind it; torch_npu is imported for npu alone."""
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # without CANN it raises ImportError, OSError or RuntimeError
            raise CapabilityError(
                f"torch_npu cannot be imported: {type(error).__name__}: {error}",
                where="training.device",
                remedy="install CANN and torch_npu (docs/ascend.md), or remove the key to train on the CPU",
            ) from error
    module: ModuleType = torch.get_device_module(kind)
    if not module.is_available():
        raise CapabilityError(
            f"torch {torch.__version__} finds no {kind} device",
            where="training.device",
            remedy="remove the key to train on the CPU, or install a torch that is built for the device",
        )
    return module
