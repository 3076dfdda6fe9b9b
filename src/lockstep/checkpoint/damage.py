"""Detection of damaged checkpoints. Every kind of damage raises `CorruptCheckpoint`."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed

WAY_OUT = "Resume from an earlier checkpoint, or copy this one again."

_OF_THE_FOLDER = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors of the operating system that indicate a damaged folder, for example a circular link."""

FEW = 64 * 2**20
"""Number of bytes to which every file may unpack, however small it is."""

TIMES = 20
"""Largest ratio of unpacked bytes to file size, above `FEW` bytes; files from ``torch.save`` are not compressed."""


@contextlib.contextmanager
def reported_as_damage(path: object) -> Iterator[None]:
    """Inside the block, convert the many errors that Python and torch raise for damaged files to `CorruptCheckpoint`.

    Args:
        path: path of the checkpoint.

    Raises:
        CorruptCheckpoint: in place of any other error, except errors of a disk and of the user's configuration.
    """
    try:
        yield
    except (CorruptCheckpoint, MisconfigurationException, RankFailed, ModuleNotFoundError):
        raise
    except Exception as error:
        # a failing disk or missing rights do not mean that the checkpoint is damaged
        if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_THE_FOLDER:
            raise
        raise CorruptCheckpoint(f"The checkpoint {str(path)!r} is damaged ({first_line(error)}). {WAY_OUT}") from error


def first_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message as text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_archive_size(file: IO[bytes], name: str) -> None:
    """Raise an error if a zip file would unpack to far more than its own size.

    Only the zip file's directory is read.

    Raises:
        CorruptCheckpoint: the file would unpack to too many bytes.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except Exception:  # not a zip file, or a damaged one: reading it raises the error
        return
    finally:
        file.seek(0)
    packed, unpacked = sum(each.compress_size for each in members), sum(each.file_size for each in members)
    # `packed > size`: members of a hostile file may share bytes
    if packed > size or unpacked > max(FEW, TIMES * size):
        raise CorruptCheckpoint(
            f"The file {name!r} has {size} bytes and would unpack to {unpacked} bytes. torch.save does not compress, "
            f"so the file is not a checkpoint, or is malicious. {WAY_OUT}"
        )


def check_index(content: Any) -> None:
    """Raise an error if the parsed ``index.json`` has wrong types, or names files outside its folder.

    Raises:
        ValueError: an entry has another type, or a file name leads out of the folder.
    """
    kinds = {"files": dict, "tensors": dict, "about": dict}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{key!r} is {type(content.get(key)).__name__}, not {kind.__name__}")
    for name, known in content["files"].items():
        here = posixpath.normpath(name)
        if posixpath.isabs(name) or here != name or here.startswith("..") or "\0" in name or "\\" in name:
            raise ValueError(f"{name!r} is not a file of this folder")
        known = known if isinstance(known, dict) else {}
        if type(known.get("bytes")) is not int or known["bytes"] < 0 or not isinstance(known.get("sha256"), str):
            raise ValueError(f"the size or the hash of the file {name!r} is missing")
    for name, entry in content["tensors"].items():
        if not isinstance(entry, dict):
            raise ValueError(f"the shape of the tensor {name!r} is missing")
