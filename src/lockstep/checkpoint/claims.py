"""Locks on the checkpoint folders of running fits. Other processes can check whether a folder is locked."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass

from lockstep.checkpoint import storage
from lockstep.checkpoint.storage import PathLike


@dataclass
class _Claim:
    descriptor: int
    holders: int


_claims: dict[str, _Claim] = {}
"""Folders that this process has locked, with a descriptor and a count of calls of `claim` for each."""


def claim(folder: PathLike) -> bool | None:
    """Lock a local folder, to mark that this process saves there. Each call needs one call of :func:`release`.

    The folder itself is locked, so no file is written. The lock ends with the process at the latest.

    Returns:
        True if the folder is locked; False if another process has locked it; None if it cannot be locked (a URL, a
        folder that does not exist, a file system without locks).
    """
    name = storage.absolute(folder)
    if name in _claims:  # a second descriptor of this process would find the folder locked
        _claims[name].holders += 1
        return True
    descriptor = _lock(name)
    if descriptor is None or descriptor < 0:
        return None if descriptor is None else False
    _claims[name] = _Claim(descriptor, 1)
    return True


def release(folder: PathLike) -> None:
    """Undo one call of :func:`claim`. The folder is unlocked once all calls are undone."""
    name = storage.absolute(folder)
    own = _claims.get(name)
    if own is None:
        return
    own.holders -= 1
    if not own.holders:
        del _claims[name]
        _unlock(own.descriptor)


def is_claimed_elsewhere(folder: PathLike, patience: float = 0.0) -> bool:
    """Return True if another process has claimed a folder, and still claims it after ``patience`` seconds."""
    name, end = storage.absolute(folder), time.monotonic() + patience
    while name not in _claims:
        descriptor = _lock(name)
        if descriptor is None or descriptor >= 0:
            if descriptor is not None:
                _unlock(descriptor)
            return False
        if time.monotonic() >= end:
            return True
        time.sleep(0.1)
    return False


def _lock(name: str) -> int | None:
    """Lock a folder and return its descriptor; -1 if another process has locked it, None if locking is impossible."""
    if storage.is_remote(name):
        return None
    try:
        import fcntl

        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return -1 if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return descriptor


def _unlock(descriptor: int) -> None:
    import fcntl

    with contextlib.suppress(OSError):
        # closing is not enough: processes that were forked meanwhile have the descriptor too, and with it the lock
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
