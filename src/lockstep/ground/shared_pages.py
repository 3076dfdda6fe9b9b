"""Memory shared by the ranks on a host: anonymous, or in a file that is deleted once all ranks have opened the file."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lockstep.ground import comm

FOLDER = "/dev/shm"
"""Folder whose files are in memory."""
PIECE = 2**22
"""Number of bytes that are reserved in one system call.

In older kernels a signal restarts a reservation of memory. One that takes longer than the ticks of a profiler's timer
would never end.
"""


class Pages(NamedTuple):
    """Memory that is shared by several processes and initially zero, with the handle of its open file."""

    memory: mmap.mmap
    handle: int  #: the open file. Locks on it belong to this process, and end when any handle on the file is closed.


class _PageFile(NamedTuple):
    """Path and identity of a shared-memory file. Other processes open the path, and check the identity."""

    path: str
    space: str  #: the namespace of process ids in which the path is valid, "" for any
    target: str  #: the target of the path, if it is a link; no other file has that name
    identity: tuple[int, int]  #: device and inode


def on_one_host(group: comm.Group) -> bool:
    """Return True if all ranks of ``group`` are on one host. Collective."""
    mine = host_number()
    # One maximum gives the largest number and, negated, the smallest.
    most, least = comm.all_reduce(torch.tensor([mine, -mine]), "max", group).tolist()
    return bool(most == -least)


def host_number() -> int:
    """Return a 63-bit hash of this host's identifier (see `host`)."""
    return int.from_bytes(hashlib.blake2b(host().encode(), digest_size=8).digest(), "big") >> 1


def host() -> str:
    """Return an identifier of this host and its current boot."""
    # Different machines may have the same hostname.
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()} {boot}"


def common_pages(
    group: comm.Group,
    size: int,
    *,
    part: tuple[int, int] | None = None,
    on_disk: bool = False,
    leaders: Sequence[int] | None = None,
) -> Pages | None:
    """Map memory that the ranks of ``group`` on a host share. Return None on all ranks if that is impossible.

    Collective. The caller closes the handle and releases the memory; no file is left.

    Args:
        group: the ranks.
        size: bytes.
        part: start and length, in bytes, of what this rank reserves, so that a lack of memory is an error here and
            not a SIGBUS later. The parts of all ranks cover the whole. ``None``: all of it.
        on_disk: allow a file in the temporary folder if shared memory is not available; for a few pages.
        leaders: for groups on several hosts, where the ranks of each host share pages: each rank's first rank on its
            host.
    """
    mine = 0 if leaders is None else leaders[comm.rank(group)]
    leader = comm.rank(group) == mine
    folders = (FOLDER, tempfile.gettempdir())[: 2 if on_disk else 1]
    makers: list[Callable[[], tuple[int, str]]] = [_unnamed, *(partial(_new_file, folder) for folder in folders)]
    for make in makers:
        made = _make(make, size) if leader else None
        handle, place = made or (None, None)
        try:
            if leaders is None:
                place = comm.broadcast_object(place, 0, group)
            else:  # the place of this rank's leader; none if the leader of any host failed
                places: list[_PageFile | None] = comm.all_gather_object(place, group)
                place = None if any(places[each] is None for each in set(leaders)) else places[mine]
            if place is None:
                _close(handle)
                continue
            if handle is None:
                handle = _open(place)
            memory = None if handle is None else _map(handle, size, part or (0, size))
            everyone = comm.all_reduce(torch.tensor([memory is not None]).int(), "min", group).item() == 1
        finally:
            if made and not made[1].space:
                # Another program may clean up that folder.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(made[1].path)
        if everyone:
            assert memory is not None
            assert handle is not None
            return Pages(memory, handle)
        _close(handle)
    return None


def _close(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)


def close_handle(pages: Pages | None) -> None:
    """Close the file handle of shared memory. The handle is needed only for locks."""
    if pages is not None:
        os.close(pages.handle)


def _make(make: Callable[[], tuple[int, str]], size: int) -> tuple[int, _PageFile] | None:
    """Create a file of ``size`` bytes. Return its handle and its `_PageFile`, or None if the creation fails."""
    try:
        handle, path = make()
    except OSError:
        return None
    valid_in = space() if make is _unnamed else ""
    try:
        os.ftruncate(handle, size)
        status = os.fstat(handle)
        target = os.readlink(f"/proc/self/fd/{handle}") if valid_in else ""
    except OSError:
        os.close(handle)
        if not valid_in:
            os.unlink(path)
        return None
    return handle, _PageFile(path, valid_in, target, (status.st_dev, status.st_ino))


def _unnamed() -> tuple[int, str]:
    """Create a file in anonymous memory, which is freed when its processes end and is not limited by /dev/shm."""
    if not hasattr(os, "memfd_create") or not space():
        raise OSError("this system does not support anonymous memory files")
    handle = os.memfd_create(f"lockstep-{secrets.token_hex(8)}")
    return handle, f"/proc/{os.getpid()}/fd/{handle}"


def _new_file(folder: str) -> tuple[int, str]:
    path = os.path.join(folder, f"lockstep-{os.getpid()}-{secrets.token_hex(8)}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), path


def space() -> str:
    """Return an identifier of this process' PID namespace (each container may have its own); "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _open(place: _PageFile) -> int | None:
    if place.space and place.space != space():
        return None
    try:
        # The id may belong to another process: in another namespace, or on a clone of the machine. Its file is left
        # alone, since opening some files (a terminal, a device) has effects.
        if place.target and os.readlink(place.path) != place.target:
            return None
        handle = os.open(place.path, os.O_RDWR)
    except OSError:
        return None
    status = os.fstat(handle)
    if (status.st_dev, status.st_ino) == place.identity:
        return handle
    os.close(handle)
    return None


def _map(handle: int, size: int, part: tuple[int, int]) -> mmap.mmap | None:
    start, length = part
    try:
        for begin in range(start, start + length, PIECE):
            piece = min(PIECE, start + length - begin)
            if hasattr(os, "posix_fallocate"):
                # A full /dev/shm is an error here, not a SIGBUS later.
                os.posix_fallocate(handle, begin, piece)
            else:
                os.pwrite(handle, bytes(piece), begin)
        return mmap.mmap(handle, size)
    except OSError:
        return None
