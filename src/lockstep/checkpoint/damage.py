"""Damage of any kind in a checkpoint is one kind of error, found before anything is unpacked."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import zipfile
from collections.abc import Iterator
from typing import IO, Any

from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed

WAY_OUT = "resume from an earlier checkpoint, or fetch this one again"

_OF_THE_FOLDER = (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors of the system that say that something in the folder is not what it was: a link in a circle, say."""

FEW = 64 * 2**20
"""Bytes that a file may unpack to whatever its size."""

TIMES = 20
"""Times its own size to which a file may unpack beyond that; torch's own are not packed at all."""


@contextlib.contextmanager
def named(path: object) -> Iterator[None]:
    """While a checkpoint is read: whatever its damage makes of Python and torch is one kind of error.

    Args:
        path: of the checkpoint.

    Raises:
        CorruptCheckpoint: in the place of any other error, but for those of a disk, and of what a user asked for.
    """
    try:
        yield
    except (CorruptCheckpoint, MisconfigurationException, RankFailed, ModuleNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_THE_FOLDER:
            raise
        said = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
        raise CorruptCheckpoint(f"The checkpoint {str(path)!r} is damaged ({what}): {WAY_OUT}.") from error


def check_archive_size(file: IO[bytes], name: str) -> None:
    """Refuse a zip file that would unpack to far more than it holds; only its directory is read.

    Raises:
        CorruptCheckpoint: it would.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except Exception:  # no zip file, or a damaged one: that is told by who reads it
        return
    finally:
        file.seek(0)
    packed, unpacked = sum(each.compress_size for each in members), sum(each.file_size for each in members)
    if packed > size or unpacked > max(FEW, TIMES * size):
        raise CorruptCheckpoint(
            f"The file {name!r} has {size} bytes and would unpack to {unpacked}: torch.save packs nothing, so it is no "
            f"checkpoint, or a hostile one: {WAY_OUT}."
        )


def check_index(content: Any) -> None:
    """Compare what an index says with what one is.

    Raises:
        ValueError: it has another form.
    """
    kinds = {"files": dict, "tensors": dict, "about": dict}
    for key, kind in kinds.items():
        if not isinstance(content.get(key), kind):
            raise ValueError(f"{key!r} is {type(content.get(key)).__name__}, and no {kind.__name__}")
    for name, known in content["files"].items():
        here = posixpath.normpath(name)
        if posixpath.isabs(name) or here != name or here.startswith("..") or "\0" in name or "\\" in name:
            raise ValueError(f"{name!r} is no file of this folder")
        known = known if isinstance(known, dict) else {}
        if type(known.get("bytes")) is not int or known["bytes"] < 0 or not isinstance(known.get("sha256"), str):
            raise ValueError(f"of the file {name!r} it has no size or no hash")
    for name, entry in content["tensors"].items():
        if not isinstance(entry, dict):
            raise ValueError(f"of the tensor {name!r} it has no shape")
