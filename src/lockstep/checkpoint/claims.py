"""Locks on folders in which a running fit saves; another process that would save or resume there detects them."""

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
"""The claims of this process, by folder."""


def claim(folder: PathLike) -> bool | None:
    """Mark a local folder as in use by this process, until it ends or calls :func:`release` as many times.

    Nothing is written: the mark is a lock on the folder itself.

    Returns:
        True if the mark is set; False if another process has set it; None if it cannot be set (a URL, a folder that
        does not exist, a file system without locks).
    """
    name = storage.absolute(folder)
    if name in _claims:  # a second descriptor of this process would find the folder locked
        _claims[name].holders += 1
        return True
    descriptor = _locked(name)
    if descriptor is None or descriptor < 0:
        return None if descriptor is None else False
    _claims[name] = _Claim(descriptor, 1)
    return True


def release(folder: PathLike) -> None:
    """Undo one :func:`claim`."""
    name = storage.absolute(folder)
    own = _claims.get(name)
    if own is None:
        return
    own.holders -= 1
    if not own.holders:
        del _claims[name]
        _unlock(own.descriptor)


def is_claimed_elsewhere(folder: PathLike, patience: float = 0.0) -> bool:
    """Return True if another process has marked a folder, and keeps the mark for ``patience`` seconds."""
    name, end = storage.absolute(folder), time.monotonic() + patience
    while name not in _claims:
        descriptor = _locked(name)
        if descriptor is None or descriptor >= 0:
            if descriptor is not None:
                _unlock(descriptor)
            return False
        if time.monotonic() >= end:
            return True
        time.sleep(0.1)
    return False


def _locked(name: str) -> int | None:
    """Return a descriptor of the folder, now locked; -1 if another process has locked it; None if it cannot be."""
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
