"""Checks of the flags that say where a run takes place: nodes, devices on a cluster, the folder of its files."""

from __future__ import annotations

from typing import Any

from lockstep.callbacks.checkpoint import Checkpoint
from lockstep.checkpoint.storage import is_remote
from lockstep.config.values import check_writable, whole
from lockstep.ground.errors import MisconfigurationException


def nodes(value: Any) -> int:
    """The number of machines.

    Raises:
        MisconfigurationException: no whole number of at least 1.
    """
    found = whole("num_nodes", value, at_least=1)
    return 1 if found is None else found


def check_devices(devices: Any, cluster: str) -> None:
    """Refuse devices by name where a cluster has dealt them out.

    Args:
        devices: as in ``Trainer(devices=...)``.
        cluster: who placed the ranks, "local" where it was this machine's user.

    Raises:
        MisconfigurationException: with what to give instead.
    """
    named = isinstance(devices, (list, tuple)) or (isinstance(devices, str) and "," in devices)
    if named and cluster != "local":
        raise MisconfigurationException(
            f"Trainer(devices={devices!r}): {cluster} has placed this process and given it its devices: give the "
            "number, or devices='auto', and choose devices when you submit the job (CUDA_VISIBLE_DEVICES)."
        )


def check_root(config: Any, logger: Any, callbacks: list[Any]) -> None:
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
    homeless = any(isinstance(c, Checkpoint) and getattr(c, "dirpath", "") is None for c in callbacks)
    if logger is None or logger is True or (logger is False and homeless):
        check_writable("default_root_dir", config.default_root_dir)
