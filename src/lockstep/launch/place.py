"""Where this process stands, read from its environment, and the launcher that follows from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.cluster.detect import Placement, detect
from lockstep.launch.script import ScriptLauncher
from lockstep.launch.spawn import SpawnLauncher

T = TypeVar("T")


def here(devices: int | None, num_nodes: int) -> Placement:
    """This process among the ranks; arguments as for :func:`lockstep.cluster.detect.detect`."""
    return detect(os.environ, devices, num_nodes)


def directly(function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` in this process: there are no other ranks to start."""
    return function(*args)


def launcher(kind: str | None, placement: Placement) -> Callable[..., Any]:
    """What calls a function on all ranks: ``launch(function, *args)``.

    Args:
        kind: a strategy's ``launcher``: None, "script" or "spawn".
        placement: from :func:`here`.
    """
    if kind is None or placement.world.size == 1 or (kind == "spawn" and placement.launched):
        return directly
    # ranks that are there already go through the script launcher too: it leaves a note of what ends them
    return (ScriptLauncher if kind == "script" else SpawnLauncher)(placement.world).launch
