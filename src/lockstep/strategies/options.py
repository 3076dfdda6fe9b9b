"""Arguments of ``DDPStrategy`` that other libraries know: which have a place here, and the reason where not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.ground.errors import MisconfigurationException

_DEVICES = "each rank has the device that the Trainer gives it; choose them by Trainer(accelerator=..., devices=...)"
_GROUP = (
    "the group of a run is all its ranks, who share data and checkpoints; a smaller one for gradients is for a "
    "hand-written loop with lockstep.DistributedDataParallel"
)
_OVERLAP = (
    "an optimizer inside the backward would see gradients before they are clipped and unscaled; use "
    "shard_optimizer=True to spread its work, or a hand-written loop"
)
REFUSED = {
    "accelerator": _DEVICES,
    "parallel_devices": _DEVICES,
    "device_ids": _DEVICES,
    "output_device": _DEVICES,
    "dim": "nothing is scattered: each rank draws its own batches",
    "process_group": _GROUP,
    "device_mesh": _GROUP,
    "mixed_precision": "choose the precision by Trainer(precision=...)",
    "delay_all_reduce_named_params": _OVERLAP,
    "param_to_hook_all_reduce": _OVERLAP,
}
"""Arguments of Lightning's DDPStrategy and of torch's DistributedDataParallel that have no place, and why."""

NO_EFFECT = ("find_unused_parameters", "skip_all_reduce_unused_params", "batched_grad_copy")
"""Taken, and not needed: unused parameters are found anyway, and gradients lie in the buckets."""

_UNSET = ("broadcast_buffers", "forward_sync_buffers")
_AS_ALWAYS: dict[str, tuple[Any, ...]] = {"dim": (0, None)}


def check_others(others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Look through the arguments that DDPStrategy has no name for.

    Args:
        others: name -> value.
        known: the names that it has.

    Raises:
        MisconfigurationException: for one that has no place here, with the way out, and for one that nobody knows.
    """
    for name, value in others.items():
        if name in NO_EFFECT or (name in REFUSED and value in _AS_ALWAYS.get(name, (None,))):
            continue
        if name in REFUSED:
            raise MisconfigurationException(f"DDPStrategy({name}={value!r:.100}): {REFUSED[name]}.")
        near = difflib.get_close_matches(name, [*known, *NO_EFFECT], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise MisconfigurationException(f"DDPStrategy({name}={value!r:.100}): there is no such argument.{hint}")


def checked_cap(name: str, value: float | None, default: float) -> float:
    """A size in MiB above 0; None is the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise MisconfigurationException(f"DDPStrategy({name}={value!r}): give a size in MiB above 0.")
    return float(value)


def checked_caps(name: str, caps: Sequence[float] | None, default: float) -> list[float]:
    """Sizes in MiB above 0; None is no size, and in the list the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if caps is not None and (isinstance(caps, str) or not isinstance(caps, Sequence)):
        raise MisconfigurationException(f"DDPStrategy({name}={caps!r:.100}): give a list of sizes in MiB, [1, 25].")
    return [checked_cap(name, cap, default) for cap in caps or ()]


def check_switches(**switches: object) -> None:
    """Refuse what is neither True nor False: a text like "False" would switch on.

    Raises:
        MisconfigurationException: with the argument's name.
    """
    for name, value in switches.items():
        if value is None and name in _UNSET:
            continue
        if isinstance(value, str) or value not in (False, True):
            raise MisconfigurationException(f"DDPStrategy({name}={value!r:.100}): give True or False.")


def checked_timeout(timeout: timedelta | None, default: timedelta) -> timedelta:
    """A length of time above 0; None is the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if timeout is None:
        return default
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise MisconfigurationException(
            f"DDPStrategy(timeout={timeout!r:.100}): give a datetime.timedelta above 0, timedelta(minutes=5) say; None "
            "is half an hour."
        )
    return timeout


def checked_backend(backend: str | None) -> str | None:
    """The name of a backend of process groups, or names by device ("cpu:gloo,cuda:nccl"), as torch writes them.

    Raises:
        MisconfigurationException: for one that torch does not know, and nobody has registered.
    """
    if backend is None:
        return None
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    names = str(backend).lower()
    for entry in names.split(","):
        name = entry.rpartition(":")[2]
        if not isinstance(backend, str) or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise MisconfigurationException(
                f"DDPStrategy(process_group_backend={backend!r:.100}): torch knows {', '.join(known)}.{hint}"
            )
    return names


def checked_plugins(cluster: object, io: object, precision: object) -> list[object]:
    """Those of the three that are there, as ``Trainer(plugins=[...])`` takes them.

    Raises:
        MisconfigurationException: for a name: there only a cluster has one.
    """
    for name, given in (("checkpoint_io", io), ("precision_plugin", precision)):
        if isinstance(given, str):
            raise MisconfigurationException(
                f"DDPStrategy({name}={given!r:.100}): give an object"
                + (", or choose by Trainer(precision=...)." if given is precision else " of a CheckpointIO's class.")
            )
    return [plugin for plugin in (cluster, io, precision) if plugin is not None]
