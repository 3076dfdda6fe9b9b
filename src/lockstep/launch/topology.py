"""Where this process stands, read from its environment, and the launcher that follows from it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.cluster.detect import NAMES, Placement, detect, is_placed
from lockstep.cluster.environments import DescribesRanks, described_world
from lockstep.launch.script import ScriptLauncher, become_srun, check_first_call, command_line
from lockstep.launch.spawn import ForkLauncher, SpawnLauncher
from lockstep.supervise.status import watch_uncaught, without_ranks

T = TypeVar("T")


def here(devices: int | None, num_nodes: int, cluster: DescribesRanks | None = None) -> Placement:
    """This process among the ranks.

    In the batch script of a SLURM job with several tasks it does not come back: the process becomes ``srun``.

    Args:
        devices: as for :func:`lockstep.cluster.detect.detect`.
        num_nodes: the same.
        cluster: the user's, which alone is asked; None: whichever the environment tells of.

    Raises:
        MisconfigurationException: flags and cluster contradict each other, or a variable is missing.
    """
    name = _known(cluster)
    if cluster is not None and name is None:
        world = described_world(cluster, devices, num_nodes)
        return Placement(world, launched=True, cluster=type(cluster).__name__)
    placement = detect(os.environ, devices, num_nodes, name)
    if placement.by_srun:
        become_srun()
    return placement


def dealt_out(cluster: DescribesRanks | None = None) -> bool:
    """Whether somebody else than lockstep places the ranks, and gives each its devices; ``cluster`` as for `here`."""
    name = _known(cluster)
    return True if cluster is not None and name is None else is_placed(os.environ, name)


def _known(cluster: object) -> str | None:
    """The name of a cluster of which lockstep reads the variables itself."""
    name = getattr(cluster, "cluster", None)
    return NAMES.get(name) if isinstance(name, str) else None


def is_interactive(placement: Placement) -> bool:
    """Whether ranks have to be started, and there is no script that could be: a notebook, or Python's prompt."""
    import __main__

    return not placement.launched and command_line(__main__, sys.argv, sys.orig_argv) is None


def directly(function: Callable[..., T], *args: object) -> T:
    """Call ``function`` in this process: there are no other ranks to start."""
    check_first_call()
    without_ranks()
    try:
        return function(*args)
    except BaseException:
        watch_uncaught()
        raise


def launcher(kind: str | None, placement: Placement, asked: object = None) -> Callable[..., Any]:
    """What calls a function on all ranks: ``launch(function, *args)``.

    Args:
        kind: a strategy's ``launcher``: None, "script", "spawn" or "fork".
        placement: from :func:`here`.
        asked: what the user gave as the Trainer's ``strategy``, which errors repeat.
    """
    if kind is None or placement.world.size == 1 or (kind != "script" and placement.launched):
        return directly
    # ranks that are there already go through the script launcher too: it leaves a note of what ends them
    if kind == "script":
        return ScriptLauncher(placement.world, placement.launched).launch
    name = "ddp_notebook" if asked == "auto" else asked if isinstance(asked, str) else None
    return (ForkLauncher if kind == "fork" else SpawnLauncher)(placement.world, name).launch
