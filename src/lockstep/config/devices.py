"""Checks of the Trainer's flags for nodes, devices and folders, and setting of torch's global switches."""

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
from lockstep.ground.torch_support import untested_device_warning
from lockstep.launch.environment import fix_cublas_workspaces

# -- nodes, devices and folders ------------------------------------------------------------------------------


def nodes(value: object) -> int:
    """Validate the flag ``num_nodes``, and return the number of nodes.

    Raises:
        MisconfigurationException: the value is not a whole number of at least 1.
    """
    return whole("num_nodes", value, at_least=1) or 1


def check_devices(devices: list[int] | str | int, cluster: str) -> None:
    """Raise an error if the user selects devices by index although a cluster has assigned devices to this process.

    Args:
        devices: value of ``Trainer(devices=...)``.
        cluster: name of the cluster that started the ranks; "local" if it was the user on this machine.

    Raises:
        MisconfigurationException: a cluster started the ranks, and ``devices`` is a list of devices.
    """
    named = isinstance(devices, (MutableSequence, tuple)) or (isinstance(devices, str) and "," in devices)
    if named and cluster != "local":
        raise MisconfigurationException(
            f"Trainer(devices={devices!r}) cannot select devices, because {cluster} started this process and assigned "
            "its devices: pass their number, or devices='auto', and select devices when you submit the job "
            "(CUDA_VISIBLE_DEVICES)."
        )


def node_devices(
    accelerator: Accelerator, devices: list[int] | str | int, assigned_by_cluster: bool, alone: bool = False
) -> tuple[list[torch.device], int | None]:
    """Return (devices that this process can use, number of ranks per node that the flags request).

    Args:
        accelerator: the accelerator.
        devices: value of ``Trainer(devices=...)``.
        assigned_by_cluster: True if a cluster has assigned this process its devices.
        alone: True if one process uses all requested devices.

    Returns:
        This node's devices by local rank, or the only device; and the number of ranks per node (None: as many as were
        started).

    Raises:
        MisconfigurationException: a device does not exist, or the value is malformed.
    """
    if alone:
        return accelerator.get_parallel_devices(devices), 1
    if accelerator.device_type == "cpu" or not assigned_by_cluster:
        found = accelerator.get_parallel_devices(devices)
        return found, None if devices == "auto" and accelerator.device_type == "cpu" else len(found)
    # This process sees only its own devices. The flag is a number of ranks, which is compared with those started.
    found = accelerator.get_parallel_devices("auto")
    if devices in ("auto", -1, "-1"):
        return found, None
    if re.fullmatch("[1-9][0-9]*", str(devices)):
        return found, int(str(devices))
    return found, len(accelerator.get_parallel_devices(devices))


def device_of(devices: list[torch.device], local_rank: int, local_size: int) -> torch.device:
    """Return the device of a rank: the only visible device, or else the device whose index is the local rank.

    Raises:
        MisconfigurationException: the node has more ranks than devices.
    """
    on_cpu = devices[0].type == "cpu"
    # A single visible device is the rank's own, unless no cluster has assigned devices to ranks.
    if len(devices) == 1 and (on_cpu or not sees_all_devices()):
        return devices[0]
    if not on_cpu and local_size > len(devices):
        has = f"{len(devices)} {devices[0].type} device{'s' * (len(devices) > 1)}"
        raise MisconfigurationException(
            f"{local_size} ranks were started on this node, but only {has} can be used: start at most {len(devices)}, "
            f"or request {local_size} devices for each node (SLURM: --gres=gpu:{local_size})"
        )
    return devices[local_rank % len(devices)]


def check_root(config: RunConfig, logger: object, callbacks: list[Any]) -> None:
    """Raise an error if the run will write to ``default_root_dir``, but the folder is not writable.

    Args:
        config: the config of the run.
        logger: value of ``Trainer(logger=...)``.
        callbacks: callbacks of the Trainer.

    Raises:
        MisconfigurationException: the folder is not writable.
    """
    # A remote folder is checked by the first write: a check would be a request to the storage.
    if config.fast_dev_run or is_remote(config.default_root_dir):
        return
    homeless = [c for c in callbacks if isinstance(c, Checkpoint) and getattr(c, "dirpath", "") is None]
    if logger is None or logger is True or (logger is False and homeless):
        check_writable("default_root_dir", config.default_root_dir)


# -- flags of the whole process ------------------------------------------------------------------------------


def apply_to_process(config: RunConfig, device_type: str) -> None:
    """Set torch's switches for the flags ``deterministic`` and ``benchmark`` in this process.

    A flag that is None does not change its switch.

    Args:
        config: the config of the run.
        device_type: device type of the run.
    """
    deterministic, benchmark = config.deterministic, config.benchmark
    # cuDNN's benchmark may choose another algorithm in each run.
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    # cuBLAS is deterministic only with a fixed workspace, which torch's switch does not set.
    if deterministic and device_type == "cuda":
        fix_cublas_workspaces()


@cache
def announce_device(device_type: str, several: bool = False) -> None:
    """Log on rank 0 if this release was not tested on this type of device, or on several devices of the type."""
    message = untested_device_warning(device_type, several)
    if message is not None:
        rank_zero_info(message)
