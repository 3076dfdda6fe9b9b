"""Files and folders that are whole or not there, on this machine and at URLs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PathLike = str | os.PathLike[str]

#: what the name of a file ends in while it is being written
UNFINISHED = ".part"
#: the file that a folder has which is written, replaced and removed as one thing
INDEX = "index.json"
#: what the name of a folder of files begins with, within a folder at a URL
WITHIN = "parts-"


def is_remote(path: PathLike) -> bool:
    """Whether `path` is a URL such as ``s3://bucket/run.ckpt`` (``file://`` is local)."""
    name = os.fspath(path)
    return "://" in name and not name.startswith("file://")


def local(path: PathLike) -> Path:
    """`path` on this machine."""
    return Path(os.fspath(path).removeprefix("file://")).expanduser()


def _remote(path: PathLike) -> tuple[Any, str]:
    """The file system of a URL, and the path on it."""
    core = importlib.import_module("fsspec.core")  # late: it comes with torch, but costs at import
    system, name = core.url_to_fs(os.fspath(path))
    system.invalidate_cache()  # other ranks write, too
    return system, name.rstrip("/")


def absolute(path: PathLike) -> str:
    """`path` from the root of the file system, without links in it; URLs as they are."""
    return os.fspath(path) if is_remote(path) else os.path.realpath(local(path))


def inside(folder: PathLike, name: str) -> str:
    """The path of a file in a folder."""
    return f"{os.fspath(folder).rstrip('/')}/{name}" if is_remote(folder) else str(local(folder) / name)


def _stem(target: Path) -> str:
    """What the hidden names begin with of whatever is to become `target`."""
    # The name is cut: with all that is added it may not pass the 255 bytes that a name can have.
    return f".{target.name.encode()[:180].decode(errors='ignore')}."


def _beside(target: Path) -> Path:
    """Where to make what is to become `target`; never the same for two writers."""
    # In the same folder, as a rename is atomic only within a file system.
    return target.with_name(f"{_stem(target)}{os.getpid()}-{threading.get_native_id()}{UNFINISHED}")


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[IO[bytes]]:
    """A binary file to write, which becomes `path` when the block ends without an error.

    Until then, and after an error, whatever was at `path` stays whole. The bytes are on the disk before the
    file gets its name, so that a machine that loses power leaves the earlier file or the new one. What a
    killed process left half-written is removed by the next success under the same name. Folders are made.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the message says which and what is free.

    Example::

        with replacing("run/last.ckpt") as file:
            file.write(b"...")
    """
    if is_remote(path):
        with _replacing_remote(path) as file:
            yield file
        return
    target = local(path)
    beside = _beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)  # a link that a killed process of the same id left: not to be written through
        with open(beside, "wb") as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            _take_place(beside, target)
        _sync_folder(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise explained(error, target) from error
        raise
    _remove_leftovers(target)


@contextlib.contextmanager
def _replacing_remote(path: PathLike) -> Iterator[IO[bytes]]:
    # Closing an fsspec file commits what was written, after an error too: so it gets another name first.
    system, name = _remote(path)
    beside = f"{name}.{os.getpid()}-{threading.get_native_id()}{UNFINISHED}"
    system.makedirs(os.path.dirname(name), exist_ok=True)
    try:
        with system.open(beside, "wb") as file:
            yield file
        if system.isdir(name):
            remove(path)
        system.mv(beside, name)
    except BaseException:
        with contextlib.suppress(Exception):
            system.rm(beside)
        raise


class NewFolder:
    """A folder to fill, which becomes `target` by :meth:`commit`; until then what is there stays whole.

    What a killed process left half-written is removed by the next success under the same name. Folders above it are
    made.

    Raises:
        OSError: the folder cannot be made, or a folder of another kind has the name.

    Attributes:
        path: where to write.
        prefix: the names of the files, as the index has them, begin with it.
    """

    prefix = ""

    def __init__(self, target: PathLike) -> None:
        self._target = local(target)
        if self._target.is_dir() and not is_index_folder(self._target) and any(self._target.iterdir()):
            raise IsADirectoryError(
                errno.EISDIR, f"{str(target)!r} is a folder that is no checkpoint: choose another name, or move it away"
            )
        beside = _beside(self._target)
        # ranks of several nodes see the folder, and process ids are those of a node
        self.path = beside.with_name(f"{beside.name.removesuffix(UNFINISHED)}-{secrets.token_hex(4)}{UNFINISHED}")
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            raise explained(error, self._target) from error
        self._descriptor = os.open(self.path, os.O_RDONLY)
        _lock(self._descriptor)

    def commit(self, index: bytes) -> None:
        """Write the index, and give the folder its name. Its other files are on the disk already."""
        with replacing(self.path / INDEX) as file:
            file.write(index)
        _sync_folder(self.path)
        try:
            _take_place(self.path, self._target)
            _sync_folder(self._target.parent)
        except OSError as error:
            raise explained(error, self._target) from error
        self._unlock()
        _remove_leftovers(self._target)

    def discard(self) -> None:
        """Remove what was written, unless it has its name."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


class NewRemoteFolder:
    """As `NewFolder`, at a URL, where nothing can be renamed as one thing.

    The files lie in a folder of their own within the target, and the index names them: it is written last, in one step,
    and what it replaces is removed then.
    """

    def __init__(self, target: PathLike) -> None:
        self._target = os.fspath(target).rstrip("/")
        self.prefix = f"{WITHIN}{secrets.token_hex(4)}/"
        self.path = f"{self._target}/{self.prefix[:-1]}"
        system, name = _remote(target)
        if system.isfile(name):
            raise FileExistsError(errno.EEXIST, f"{self._target!r} is a file: choose another name, or move it away")
        is_other = not is_index_folder(target) and not _is_unfinished(system, name) if system.isdir(name) else False
        if is_other and _names(system, name):
            raise IsADirectoryError(
                errno.EISDIR,
                f"{self._target!r} is a folder that is no checkpoint: choose another name, or move it away",
            )
        self._is_there = False
        system.makedirs(f"{name}/{self.prefix[:-1]}", exist_ok=True)

    def commit(self, index: bytes) -> None:
        """Write the index, after which the folder is the new one, and remove the files of the earlier one."""
        with replacing(inside(self._target, INDEX)) as file:
            file.write(index)
        self._is_there = True
        system, name = _remote(self._target)
        for found in _names(system, name):
            if found.startswith(WITHIN) and f"{found}/" != self.prefix:
                with contextlib.suppress(Exception):  # left there, it is no part of the checkpoint
                    system.rm(f"{name}/{found}", recursive=True)

    def discard(self) -> None:
        """Remove what was written, unless an index names it."""
        if not self._is_there:
            with contextlib.suppress(Exception):
                system, name = _remote(self.path)
                system.rm(name, recursive=True)


def new_folder(target: PathLike) -> NewFolder | NewRemoteFolder:
    """A folder to fill, on this machine or at a URL."""
    return NewRemoteFolder(target) if is_remote(target) else NewFolder(target)


def is_index_folder(path: PathLike) -> bool:
    """Whether `path` is a folder that is written, replaced and removed as one thing: it has an index."""
    if is_remote(path):
        system, name = _remote(path)
        return not system.isfile(name) and bool(system.isfile(f"{name}/{INDEX}"))
    return (local(path) / INDEX).is_file()


def _names(system: Any, folder: str) -> list[str]:
    """Names of what is in a folder of a URL's file system."""
    return [os.path.basename(entry.rstrip("/")) for entry in system.ls(folder, detail=False)]


def _is_unfinished(system: Any, folder: str) -> bool:
    """Whether a folder of a URL's file system has files of a checkpoint, and no index yet."""
    found = _names(system, folder)
    return INDEX not in found and any(name.startswith(WITHIN) for name in found)


_RACES = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""What a rename fails of where another writer has put something in the place, or taken it away."""


def _take_place(beside: Path, target: Path) -> None:
    """Gives a finished file, link or folder its name; what had it is gone then, unless it is a folder without index."""
    for tries_left in range(9, -1, -1):
        is_folder = target.is_dir() and not target.is_symlink()
        if is_folder:
            swaps = is_index_folder(target)
        else:
            swaps = os.path.lexists(target) and beside.is_dir() and not beside.is_symlink()
        try:
            if swaps:
                _remove_tree(_exchange(beside, target))
            else:
                os.replace(beside, target)
            return
        except OSError as error:
            if error.errno not in _RACES or not tries_left or not os.path.lexists(beside):
                raise


def _exchange(beside: Path, target: Path) -> Path:
    """Lets two names change places, and gives the one that what was at `target` has then.

    Where the system cannot do that in one step, nothing has the name `target` for a moment.
    """
    swap = _renameat2()
    if swap is not None:
        at_cwd, exchange = -100, 2
        if swap(at_cwd, os.fsencode(beside), at_cwd, os.fsencode(target), exchange) == 0:
            return beside
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(target))
    aside = beside.with_name(f"{_stem(target)}{secrets.token_hex(4)}{UNFINISHED}")
    os.rename(target, aside)
    try:
        os.rename(beside, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


@functools.cache
def _renameat2() -> Any:
    """Linux's function that can exchange two names; None elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).renameat2
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        return function
    return None


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(file: IO[bytes] | int) -> None:
    """Marks `file` as being written by a running process; the mark ends with the process."""
    with contextlib.suppress(ImportError, OSError):  # no fcntl, or a file system without locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_LEFTOVER = re.compile(r"\..+\.(\d+-\d+(-[0-9a-f]{8})?|[0-9a-f]{8})" + re.escape(UNFINISHED))
"""The names that this file gives to what is under way, whatever it is to become."""


def _remove_leftovers(target: Path) -> None:
    """Remove what killed processes left of what was to become `target`, or had been it."""
    stem = _stem(target)
    for name in os.listdir(target.parent):
        if name.startswith(stem) and name.endswith(UNFINISHED):
            _remove_unless_locked(target.with_name(name))


def remove_leftovers(folder: PathLike) -> None:
    """Remove all that killed processes left half-written in a local `folder`; at a URL nothing is removed.

    A whole folder gets its name back if it was moved aside for another one that never came.
    """
    here = local(folder)
    if is_remote(folder) or not here.is_dir():
        return
    for name in os.listdir(here):
        found = _LEFTOVER.fullmatch(name)
        if found is None:
            continue
        was_moved_aside = "-" not in found[1] and is_index_folder(here / name)
        target = here / name[1 : found.start(1) - 1]
        if was_moved_aside and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(here / name, target)
        else:
            _remove_unless_locked(here / name)


def _remove_unless_locked(leftover: Path) -> None:
    with contextlib.suppress(ImportError, OSError):  # OSError: locked by a running writer, or gone
        if leftover.is_symlink():  # cannot be locked; a running process makes its link again
            leftover.unlink()
            return
        import fcntl

        descriptor = os.open(leftover, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(leftover)
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def written_by_torch(folder: Path) -> Iterator[None]:
    """While torch writes files by itself: it reports a full disk by a position in its own source.

    Raises:
        OSError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        raise_interruption(error)
        words = ("inline_container", "PytorchStreamWriter", "iostream")
        if not any(word in str(error) for word in words):
            raise
        number = errno.ENOSPC if shutil.disk_usage(folder).free < 2**20 else errno.EIO
        raise explained(OSError(number, os.strerror(number)), folder / INDEX) from error


def raise_interruption(error: RuntimeError) -> None:
    """Raise what interrupted torch while it wrote (a Ctrl-C), where it reports a file that is not whole instead."""
    interruption = error.__context__
    if interruption is not None and not isinstance(interruption, Exception):
        raise interruption.with_traceback(None) from None


def explained(error: OSError, target: Path) -> OSError:
    """`error` as one sentence about the file that was not written."""
    standing = "the earlier file under this name is whole" if target.is_file() else "no file has this name"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            standing = f"{shutil.disk_usage(target.parent).free / 2**20:.0f} MiB are free; {standing}"
        reason = f"there is no room ({os.strerror(error.errno)}; {standing}): make room, or choose another folder"
    elif target.is_dir():
        reason = "there is a folder of this name: choose another name, or move it away"
    else:
        cause = error.strerror or str(error)
        reason = f"its folder cannot be written ({cause}; {standing}): choose another folder, or change its rights"
    return type(error)(error.errno or errno.EIO, f"could not write {str(target)!r}: {reason}")


@contextlib.contextmanager
def reading(path: PathLike | IO[bytes]) -> Iterator[IO[bytes]]:
    """A binary file to read, at whose positions one may jump. A remote one is copied to a temporary file.

    A file that is open already is read from its beginning, and stays open.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        path.seek(0)
        yield path
        return
    if not is_remote(path):
        with open(local(path), "rb") as file:
            yield file
        return
    system, name = _remote(path)
    with system.open(name, "rb") as source, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy, 1 << 22)
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def opened(path: PathLike) -> Iterator[IO[bytes]]:
    """A binary file to read a piece of, at whose positions one may jump; nothing of it is copied to this machine.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if is_remote(path):
        system, name = _remote(path)
        with system.open(name, "rb") as file:
            yield file
    else:
        with open(local(path), "rb") as file:
            yield file


def make_folder(folder: PathLike) -> None:
    """Make a folder, and those above it, where they are not there."""
    if is_remote(folder):
        system, name = _remote(folder)
        system.makedirs(name, exist_ok=True)
    else:
        local(folder).mkdir(parents=True, exist_ok=True)


def create(path: PathLike) -> IO[bytes]:
    """A new binary file in a folder that is there; whoever asks for it closes it."""
    if is_remote(path):
        system, name = _remote(path)
        file: IO[bytes] = system.open(name, "wb")
        return file
    return open(local(path), "wb")


def is_file(path: PathLike) -> bool:
    """Whether there is a file at `path`."""
    if is_remote(path):
        system, name = _remote(path)
        return bool(system.isfile(name))
    return local(path).is_file()


def exists(path: PathLike) -> bool:
    """Whether there is a file or folder at `path`; a link that leads nowhere, or a folder under way, is nothing."""
    if is_remote(path):
        system, name = _remote(path)
        return bool(system.isfile(name) or (system.isdir(name) and not _is_unfinished(system, name)))
    return local(path).exists()


def size(path: PathLike) -> int:
    """Bytes of the file at `path`."""
    if is_remote(path):
        system, name = _remote(path)
        return int(system.size(name))
    return local(path).stat().st_size


def sizes(folder: PathLike) -> dict[str, int]:
    """Bytes of each file in `folder` and in folders within it, by its path from there; a URL is listed once."""
    if is_remote(folder):
        system, name = _remote(folder)
        found = system.find(name, detail=True)
        return {path[len(name) :].lstrip("/"): int(each["size"]) for path, each in found.items()}
    here = local(folder)
    return {each.relative_to(here).as_posix(): each.stat().st_size for each in here.rglob("*") if each.is_file()}


def modified(path: PathLike) -> float:
    """When the file was written, in seconds since 1970."""
    if is_remote(path):
        if is_index_folder(path):
            return modified(inside(path, INDEX))
        system, name = _remote(path)
        return float(system.modified(name).timestamp())
    return local(path).stat().st_mtime


def names(folder: PathLike) -> list[str]:
    """Sorted names of what is in `folder`, but for what is being written; none if there is no folder."""
    if is_remote(folder):
        system, name = _remote(folder)
        entries = system.ls(name, detail=True) if system.isdir(name) else []
        whole = [each for each in entries if each["type"] != "directory" or not _is_unfinished(system, each["name"])]
        found = [os.path.basename(each["name"].rstrip("/")) for each in whole]
    else:
        found = os.listdir(local(folder)) if local(folder).is_dir() else []
    return sorted(name for name in found if not name.endswith(UNFINISHED))


def remove(path: PathLike) -> None:
    """Deletes the file, the link, or the folder with an index at `path`; nothing happens if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _remote(path)
            has_index = is_index_folder(path)
            if has_index:
                system.rm(f"{name}/{INDEX}")  # so that a killed process leaves nothing that could be taken for whole
            system.rm(name, recursive=has_index or (system.isdir(name) and _is_unfinished(system, name)))
            return
        here = local(path)
        if not here.is_symlink() and is_index_folder(here):
            # in one step, so that a killed process leaves no half of it under its name
            hidden = here.with_name(f"{_stem(here)}{secrets.token_hex(4)}{UNFINISHED}")
            os.rename(here, hidden)
            (hidden / INDEX).unlink(missing_ok=True)  # a leftover without an index is no checkpoint
            _remove_tree(hidden)
        else:
            here.unlink()


def rename(path: PathLike, new: PathLike) -> None:
    """Gives a file another name; what had that is replaced on this machine."""
    if is_remote(path):
        system, name = _remote(path)
        system.mv(name, _remote(new)[1])
    else:
        os.replace(local(path), local(new))


def lies_in(path: PathLike, folder: PathLike) -> bool:
    """Whether the file or link at `path` lies in `folder` or below it, links in the way followed."""
    if is_remote(path) or is_remote(folder):
        parts, outer = str(path).split("/"), str(folder).rstrip("/").split("/")
        return len(parts) > len(outer) and parts[: len(outer)] == outer and not {"..", ".", ""} & {*parts[len(outer) :]}
    here = local(path)
    if here.name in ("", ".."):
        return False
    return Path(os.path.realpath(folder)) in (Path(os.path.realpath(here.parent)) / here.name).parents


def link(path: PathLike, target: PathLike) -> None:
    """Makes `path` a relative symbolic link to the local file or folder `target`, in place of what had that name.

    What a killed process left under way is removed, as by :func:`replacing`.
    """
    name, destination = local(path).absolute(), local(target).absolute()
    beside, leads_to = _beside(name), os.path.relpath(destination, name.parent)
    while True:
        beside.unlink(missing_ok=True)
        beside.symlink_to(leads_to)
        try:
            _take_place(beside, name)
        except FileNotFoundError:  # another writer of the same name took it for a leftover
            continue
        break
    _remove_leftovers(name)


def check_writable(folder: PathLike) -> None:
    """Checks, without making anything, that files can be written to `folder` or to where it will be made.

    Raises:
        OSError: they cannot; the message says what stands in the way. URLs are not checked.
    """
    if is_remote(folder):
        return
    wanted = local(folder).absolute()
    ancestor = wanted
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, f"the folder {str(wanted)!r} cannot be made, since {str(ancestor)!r} is a file"
        )
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES,
            f"the folder {str(wanted)!r} cannot be written, for want of rights in {str(ancestor)!r}: choose another",
        )
