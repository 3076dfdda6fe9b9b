"""What a process takes over from whoever started it: its rank, the seed, and its end with the parent."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping

import torch.utils.data.dataloader

from lockstep.cluster.detect import early_rank
from lockstep.ground.installed import FORK_WORKERS
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.seed import hand_down_seed
from lockstep.launch.parent_death import PARENT, bind, end_with, prctl
from lockstep.supervise.status import note_early

SEED = "PL_GLOBAL_SEED"
"""The variable with the seed, by the name that Lightning gave it."""

_LOADER = torch.utils.data.dataloader.__file__


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return None


started_in = _working_folder()
"""The working folder when lockstep was imported: where a script is started once more."""


def inherit(environ: Mapping[str, str] = os.environ) -> None:
    """Take over rank and seed, and end with the parent.

    Called when `lockstep` is imported, so that `rank_zero_only` and a bare ``seed_everything()`` are right
    in the lines of a script that come before its Trainer.
    """
    rank_zero_only.rank = early_rank(environ)
    if SEED in environ:
        hand_down_seed(int(environ[SEED]))
    if PARENT in environ:
        end_with(int(environ[PARENT]))
        if environ[PARENT] == str(os.getppid()):
            note_early(environ)


def bind_loader_workers() -> None:
    """Have the system kill loader workers that are forked here when this process ends, however it does.

    By themselves they look for their parent every 5 seconds. Those that are not forked do so still.
    """
    found = prctl()
    if found is not None:
        FORK_WORKERS.at_fork(after_in_child=functools.partial(_bind_loader_worker, found))


def _bind_loader_worker(found: Callable[..., int]) -> None:
    frame, made = sys._getframe(), threading.main_thread() is threading.current_thread()
    while made and frame is not None:  # what counts is the end of a thread, so the loader's must be the main one
        if frame.f_code.co_filename == _LOADER:
            bind(found)
            return
        frame = frame.f_back  # type: ignore[assignment]
