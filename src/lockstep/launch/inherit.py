"""What a process takes over from whoever started it: its rank, the seed, its bond to the parent."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch.utils.data.dataloader

from lockstep.cluster.detect import early_rank
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.seed import hand_down_seed
from lockstep.launch.attendance import note_early

SEED = "PL_GLOBAL_SEED"
"""The variable with the seed, by the name that Lightning gave it."""
PARENT = "LOCKSTEP_PARENT"
"""The variable with the process that a rank must not outlive."""

_PR_SET_PDEATHSIG = 1
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


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends (on Linux; elsewhere this does nothing).

    A parent may be killed at any moment. A rank that outlived it would wait in a collective for ever, and
    hold its port and its device.

    Args:
        parent: the process that started the ranks. A process that it did not start itself, a loader worker
            of a rank say, is left alone as long as it lives.
    """
    if not sys.platform.startswith("linux"):
        return
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent and not _is_alive(parent):
        os._exit(1)  # it ended before the bond was made


@functools.cache
def bind_loader_workers() -> None:
    """Have the system kill loader workers that are forked here when this process ends, however it does.

    By themselves they look for their parent every 5 seconds. Those that are not forked do so still.
    """
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)  # not in the child: it should do as little as it can
        os.register_at_fork(after_in_child=functools.partial(_bind_loader_worker, libc.prctl))


def _bind_loader_worker(prctl: Any) -> None:
    frame, made = sys._getframe(), threading.main_thread() is threading.current_thread()
    while made and frame is not None:  # the bond is to a thread, so that of the loader must be the main one
        if frame.f_code.co_filename == _LOADER:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            return
        frame = frame.f_back  # type: ignore[assignment]


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is somebody else's
        return True
    return True
