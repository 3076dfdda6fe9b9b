"""Choice of the launcher for a Trainer's calls, from the strategy and this process' environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.cluster.detect import NAMES, Placement, detect, is_placed
from lockstep.cluster.environments import DescribesRanks, described_world
from lockstep.launch.script import ScriptLauncher, become_srun, check_first_call, command_line
from lockstep.supervise.status import count_call_without_ranks, watch_uncaught

T = TypeVar("T")


def here(devices: int | None, num_nodes: int, cluster: DescribesRanks | None = None) -> Placement:
    """Return this process's `Placement`: its World, its cluster, and whether ranks still have to be started.

    Does not return in the batch script of a SLURM job with several tasks: the process becomes ``srun``.

    Args:
        devices: as for :func:`lockstep.cluster.detect.detect`.
        num_nodes: the same.
        cluster: the user's cluster environment; None: the one that the environment variables indicate.

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


def is_placed_by_cluster(cluster: DescribesRanks | None = None) -> bool:
    """Return True if a cluster, and not lockstep, places the ranks and assigns their devices.

    ``cluster`` is as for `here`.
    """
    name = _known(cluster)
    return True if cluster is not None and name is None else is_placed(os.environ, name)


def _known(cluster: object) -> str | None:
    """Return the name of the recognized cluster to which a user's cluster environment belongs.

    Return None for any other object.
    """
    name = getattr(cluster, "cluster", None)
    return NAMES.get(name) if isinstance(name, str) else None


def is_interactive(placement: Placement) -> bool:
    """Return True if ranks have to be started but there is no script, as in a notebook or at Python's prompt."""
    import __main__

    return not placement.launched and command_line(__main__, sys.argv, sys.orig_argv) is None


def directly(function: Callable[..., T], *args: object) -> T:
    """Call ``function`` in this process alone, without other ranks."""
    check_first_call()
    count_call_without_ranks()
    try:
        return function(*args)
    except BaseException:
        watch_uncaught()
        raise


def launcher(kind: str | None, placement: Placement, strategy: object = None) -> Callable[..., Any]:
    """Return the function ``launch(function, *args)`` that calls ``function`` on all ranks.

    Args:
        kind: a strategy's ``launcher``: None, "script", "spawn" or "fork".
        placement: result of :func:`here`.
        strategy: the user's ``strategy`` argument of the Trainer, for error messages.
    """
    if kind is None or placement.world.size == 1 or (kind != "script" and placement.launched):
        return directly
    # running ranks use the script launcher, too: it records what ends them
    if kind == "script":
        return ScriptLauncher(placement.world, placement.launched).launch
    # spawned ranks alone need it, and the monitor that it brings
    from lockstep.launch.spawn import ForkLauncher, SpawnLauncher

    name = "ddp_notebook" if strategy == "auto" else strategy if isinstance(strategy, str) else None
    return (ForkLauncher if kind == "fork" else SpawnLauncher)(placement.world, name).launch
