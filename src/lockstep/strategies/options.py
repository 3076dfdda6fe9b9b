"""Arguments of ``DDPStrategy`` that other libraries know: which have a place here, and the reason where not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

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
