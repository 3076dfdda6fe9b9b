"""Checks of the flags that say where a run takes place (nodes, devices, folders), and torch's process-wide flags."""

from __future__ import annotations

import re
from collections.abc import MutableSequence
from functools import cache
from typing import Any

import torch

from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.checkpoint.storage import is_remote
from lockstep.cluster.torchelastic import sees_all_devices
from lockstep.config.run import RunConfig, check_writable, whole
from lockstep.ground.accelerators import Accelerator
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info
from lockstep.ground.torch_support import untried
from lockstep.launch.environment import fix_cublas_workspaces

# -- where a run takes place ---------------------------------------------------------------------------------


def nodes(value: object) -> int:
    """The number of machines.

    Raises:
        MisconfigurationException: no whole number of at least 1.
    """
    return whole("num_nodes", value, at_least=1) or 1


def check_devices(devices: list[int] | str | int, cluster: str) -> None:
    """Refuse devices by name where a cluster has dealt them out.

    Args:
        devices: as in ``Trainer(devices=...)``.
        cluster: who placed the ranks, "local" where it was this machine's user.

    Raises:
        MisconfigurationException: with what to give instead.
    """
    named = isinstance(devices, (MutableSequence, tuple)) or (isinstance(devices, str) and "," in devices)
    if named and cluster != "local":
        raise MisconfigurationException(
            f"Trainer(devices={devices!r}): {cluster} has placed this process and given it its devices: give the "
            "number, or devices='auto', and choose devices when you submit the job (CUDA_VISIBLE_DEVICES)."
        )


def node_devices(
    accelerator: Accelerator, devices: list[int] | str | int, dealt_out: bool, alone: bool = False
) -> tuple[list[torch.device], int | None]:
    """The devices that this process may have, and how many ranks on each node the flags ask for.

    Args:
        accelerator: an Accelerator.
        devices: as in ``Trainer(devices=...)``.
        dealt_out: whether a cluster has given this process its devices: then it sees those, and the flag is a number
            of ranks, which is compared with those that were started.
        alone: whether one process is to have all devices that are asked for.

    Returns:
        this node's devices by local rank, or the only one; and the number, None for as many as there are.

    Raises:
        MisconfigurationException: devices that are not there, or a value that names none.
    """
    if alone:
        return accelerator.get_parallel_devices(devices), 1
    if accelerator.device_type == "cpu" or not dealt_out:
        found = accelerator.get_parallel_devices(devices)
        return found, None if devices == "auto" and accelerator.device_type == "cpu" else len(found)
    found = accelerator.get_parallel_devices("auto")
    if devices in ("auto", -1, "-1"):
        return found, None
    if re.fullmatch("[1-9][0-9]*", str(devices)):
        return found, int(str(devices))
    return found, len(accelerator.get_parallel_devices(devices))


def device_of(devices: list[torch.device], local_rank: int, local_size: int) -> torch.device:
    """The device of a rank: the only one that it sees, else the one of its number.

    Raises:
        MisconfigurationException: the node has more ranks than devices.
    """
    on_cpu = devices[0].type == "cpu"
    if len(devices) == 1 and (on_cpu or not sees_all_devices()):
        return devices[0]
    if not on_cpu and local_size > len(devices):
        has = f"{len(devices)} {devices[0].type} device{'s' * (len(devices) > 1)}"
        raise MisconfigurationException(
            f"{local_size} ranks on this node, which has {has} for them: start {len(devices)} or less, or ask the "
            f"cluster for {local_size} devices a node (SLURM: --gres=gpu:{local_size})"
        )
    return devices[local_rank % len(devices)]


def check_root(config: RunConfig, logger: object, callbacks: list[Any]) -> None:
    """Refuse a ``default_root_dir`` that cannot be written to, where files are to go there.

    Args:
        config: the RunConfig.
        logger: as in ``Trainer(logger=...)``.
        callbacks: of the Trainer.

    Raises:
        MisconfigurationException: with the folder.
    """
    if config.fast_dev_run or is_remote(config.default_root_dir):
        return
    homeless = [c for c in callbacks if isinstance(c, Checkpoint) and getattr(c, "dirpath", "") is None]
    if logger is None or logger is True or (logger is False and homeless):
        check_writable("default_root_dir", config.default_root_dir)


# -- flags of the whole process ------------------------------------------------------------------------------


def apply_to_process(config: RunConfig, device_type: str) -> None:
    """Set what ``deterministic`` and ``benchmark`` ask for in this process; None leaves torch as it is.

    Args:
        config: the RunConfig.
        device_type: of the run; only CUDA needs more than torch's own switch.
    """
    deterministic, benchmark = config.deterministic, config.benchmark
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic and device_type == "cuda":
        fix_cublas_workspaces()


@cache
def announce_device(device_type: str, several: bool = False) -> None:
    """Say, once and on rank 0, that this release never ran on such a device, or several, where that is so."""
    told = untried(device_type, several)
    if told is not None:
        rank_zero_info(told)
