"""Atomic writes, replacements and removals of files and folders, on this machine and at URLs."""

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

#: suffix of a file's name while it is being written
UNFINISHED = ".part"
#: the file that marks a folder as one that is written, replaced and removed as a unit
INDEX = "index.json"
#: prefix of the names of inner folders with files, at a URL
WITHIN = "parts-"


def is_remote(path: PathLike) -> bool:
    """Return True if `path` is a URL such as ``s3://bucket/run.ckpt`` (``file://`` is local)."""
    name = os.fspath(path)
    return "://" in name and not name.startswith("file://")


def local(path: PathLike) -> Path:
    """Convert a local path, which may be a ``file://`` URL, to a `Path`."""
    return Path(os.fspath(path).removeprefix("file://")).expanduser()


def _remote(path: PathLike) -> tuple[Any, str]:
    """Return (file system, path in this file system) for a URL."""
    core = importlib.import_module("fsspec.core")  # late: torch requires it, but the import is slow
    system, name = core.url_to_fs(os.fspath(path))
    system.invalidate_cache()  # other ranks write, too
    return system, name.rstrip("/")


def absolute(path: PathLike) -> str:
    """Return the absolute `path` with links resolved; URLs are unchanged."""
    return os.fspath(path) if is_remote(path) else os.path.realpath(local(path))


def inside(folder: PathLike, name: str) -> str:
    """Return the path of a file in a folder."""
    return f"{os.fspath(folder).rstrip('/')}/{name}" if is_remote(folder) else str(local(folder) / name)


def _stem(target: Path) -> str:
    """Return the prefix of all temporary names for `target`."""
    # The name is cut: with all suffixes it must not exceed 255 bytes.
    return f".{target.name.encode()[:180].decode(errors='ignore')}."


def _temporary_path(target: Path) -> Path:
    """Return the path under which this thread writes `target` before renaming it."""
    # In the same folder, as a rename is atomic only within a file system.
    return target.with_name(f"{_stem(target)}{os.getpid()}-{threading.get_native_id()}{UNFINISHED}")


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, and rename it to `path` if the ``with`` block succeeds.

    Until then, and after an error, an earlier file at `path` stays intact. The bytes are synced before the rename, so
    after a power loss either the earlier file or the new one exists. Half-written files from a killed process are
    removed by the next successful write to `path`. Missing folders are created.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the message has the reason and the free space.

    Example::

        with replacing("run/last.ckpt") as file:
            file.write(b"...")
    """
    if is_remote(path):
        with _replacing_remote(path) as file:
            yield file
        return
    target = local(path)
    temporary = _temporary_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # never write through a link that a killed process of the same id left
        with open(temporary, "wb") as file:
            _lock(file)
            yield file
            file.flush()
            # before the rename: after a power loss the name must not belong to a file without its bytes
            os.fsync(file.fileno())
            _take_place(temporary, target)  # while the file is locked: another process may not remove it as a leftover
        _sync_folder(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise explain(error, target) from error
        raise
    _remove_leftovers(target)


@contextlib.contextmanager
def _replacing_remote(path: PathLike) -> Iterator[IO[bytes]]:
    # Closing an fsspec file commits what was written, even after an error; hence the temporary name.
    system, name = _remote(path)
    temporary = f"{name}.{os.getpid()}-{threading.get_native_id()}{UNFINISHED}"
    system.makedirs(os.path.dirname(name), exist_ok=True)
    try:
        with system.open(temporary, "wb") as file:
            yield file
        if system.isdir(name):  # a checkpoint in parts of an earlier run
            remove(path)
        system.mv(temporary, name)
    except BaseException:
        with contextlib.suppress(Exception):
            system.rm(temporary)
        raise


class NewFolder:
    """A temporary folder that :meth:`commit` renames to `target`.

    Until then, an earlier folder with the name `target` stays intact.

    Half-written folders from a killed process are removed by the next successful write to `target`. Missing parent
    folders are created.

    Raises:
        OSError: the folder cannot be created, or `target` is a folder but not a checkpoint.

    Attributes:
        path: the path to write to.
        prefix: prefix of the file names in the index.
    """

    prefix = ""

    def __init__(self, target: PathLike) -> None:
        self._target = local(target)
        if self._target.is_dir() and not is_index_folder(self._target) and any(self._target.iterdir()):
            raise IsADirectoryError(
                errno.EISDIR,
                f"{str(target)!r} is a folder but not a checkpoint. Choose another name, or move the folder",
            )
        temporary = _temporary_path(self._target)
        # ranks of several nodes see the folder, and a process id is unique only on its node
        self.path = temporary.with_name(f"{temporary.name.removesuffix(UNFINISHED)}-{secrets.token_hex(4)}{UNFINISHED}")
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            raise explain(error, self._target) from error
        self._descriptor = os.open(self.path, os.O_RDONLY)
        _lock(self._descriptor)

    def commit(self, index: bytes) -> None:
        """Write the index, and rename the folder to its final name. All other files must be on the disk already."""
        with replacing(self.path / INDEX) as file:
            file.write(index)
        _sync_folder(self.path)  # the entries of the ranks' files
        try:
            _take_place(self.path, self._target)
            _sync_folder(self._target.parent)
        except OSError as error:
            raise explain(error, self._target) from error
        self._unlock()
        _remove_leftovers(self._target)

    def discard(self) -> None:
        """Delete the temporary folder, unless it was renamed."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


class NewRemoteFolder:
    """A `NewFolder` at a URL, where a folder cannot be renamed atomically.

    The files are in an inner folder of the target, and the index names them. The index is written last, in one step;
    then the files that it replaces are removed.
    """

    def __init__(self, target: PathLike) -> None:
        self._target = os.fspath(target).rstrip("/")
        self.prefix = f"{WITHIN}{secrets.token_hex(4)}/"
        self.path = f"{self._target}/{self.prefix[:-1]}"
        system, name = _remote(target)
        if system.isfile(name):
            raise FileExistsError(errno.EEXIST, f"{self._target!r} is a file. Choose another name, or move the file")
        is_other = not is_index_folder(target) and not _is_unfinished(system, name) if system.isdir(name) else False
        if is_other and _names(system, name):  # an empty folder may be replaced
            raise IsADirectoryError(
                errno.EISDIR,
                f"{self._target!r} is a folder but not a checkpoint. Choose another name, or move the folder",
            )
        self._is_there = False
        system.makedirs(f"{name}/{self.prefix[:-1]}", exist_ok=True)

    def commit(self, index: bytes) -> None:
        """Write the index, which completes the checkpoint. Then delete an earlier checkpoint's files at this URL."""
        with replacing(inside(self._target, INDEX)) as file:
            file.write(index)
        self._is_there = True
        system, name = _remote(self._target)
        for found in _names(system, name):
            if found.startswith(WITHIN) and f"{found}/" != self.prefix:
                with contextlib.suppress(Exception):  # if it stays, it is not part of the checkpoint
                    system.rm(f"{name}/{found}", recursive=True)

    def discard(self) -> None:
        """Delete the new files, unless the index was written."""
        if not self._is_there:
            with contextlib.suppress(Exception):
                system, name = _remote(self.path)
                system.rm(name, recursive=True)


def new_folder(target: PathLike) -> NewFolder | NewRemoteFolder:
    """Return a writer of a new folder, on this machine or at a URL."""
    return NewRemoteFolder(target) if is_remote(target) else NewFolder(target)


def is_index_folder(path: PathLike) -> bool:
    """Return True if `path` is a folder with an index, which is replaced and removed as a unit."""
    if is_remote(path):
        system, name = _remote(path)
        return not system.isfile(name) and bool(system.isfile(f"{name}/{INDEX}"))
    return (local(path) / INDEX).is_file()


def _names(system: Any, folder: str) -> list[str]:
    """Return the names of a remote folder's entries."""
    return [os.path.basename(entry.rstrip("/")) for entry in system.ls(folder, detail=False)]


def _is_unfinished(system: Any, folder: str) -> bool:
    """Return True if a remote folder has files of a checkpoint, but no index."""
    found = _names(system, folder)
    return INDEX not in found and any(name.startswith(WITHIN) for name in found)


_RACES = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
"""Errors from a rename if another writer has created or removed the target at the same time."""


def _take_place(temporary: Path, target: Path) -> None:
    """Rename a complete file, link or folder to `target`, and replace any existing file, link or checkpoint folder.

    A folder without an index, which is no checkpoint, is not replaced.
    """
    for tries_left in range(9, -1, -1):
        is_folder = target.is_dir() and not target.is_symlink()
        if is_folder:
            swaps = is_index_folder(target)
        else:
            swaps = os.path.lexists(target) and temporary.is_dir() and not temporary.is_symlink()
        try:
            # `os.replace` refuses a folder that is not empty, and a file in the place of a folder
            if swaps:
                _remove_tree(_exchange(temporary, target))
            else:
                os.replace(temporary, target)
            return
        except OSError as error:
            if error.errno not in _RACES or not tries_left or not os.path.lexists(temporary):
                raise


def _exchange(temporary: Path, target: Path) -> Path:
    """Swap the files or folders at two paths. Return the new path of the one that was at `target`.

    If the system cannot swap names atomically, `target` does not exist for a moment.
    """
    swap = _renameat2()
    if swap is not None:
        at_cwd, exchange = -100, 2
        if swap(at_cwd, os.fsencode(temporary), at_cwd, os.fsencode(target), exchange) == 0:
            return temporary
        number = ctypes.get_errno()
        # an old kernel, or a file system such as NFS: the two renames below do it then
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(target))
    aside = temporary.with_name(f"{_stem(target)}{secrets.token_hex(4)}{UNFINISHED}")
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    return aside


@functools.cache
def _renameat2() -> Any:
    """Return the C function ``renameat2``, which can swap two names; None on systems other than Linux."""
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
    """Lock a temporary file or folder while this process writes it.

    Other processes delete unlocked ones as leftovers.
    """
    with contextlib.suppress(ImportError, OSError):  # no fcntl, or a file system without locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_LEFTOVER = re.compile(r"\..+\.(\d+-\d+(-[0-9a-f]{8})?|[0-9a-f]{8})" + re.escape(UNFINISHED))
"""Pattern for the temporary names of this module."""


def _remove_leftovers(target: Path) -> None:
    """Delete temporary files and folders for `target` that killed processes have left."""
    stem = _stem(target)
    for name in os.listdir(target.parent):
        if name.startswith(stem) and name.endswith(UNFINISHED):
            _remove_unless_locked(target.with_name(name))


def remove_leftovers(folder: PathLike) -> None:
    """Delete all temporary files and folders in a local `folder` that killed processes have left; skip URLs.

    A complete folder gets its name back if it was moved aside for another one that was never finished.
    """
    here = local(folder)
    if is_remote(folder) or not here.is_dir():
        return
    for name in os.listdir(here):
        found = _LEFTOVER.fullmatch(name)
        if found is None:
            continue
        # names without a process id are those of whole folders, which `_exchange` or `remove` has moved
        was_moved_aside = "-" not in found[1] and is_index_folder(here / name)
        target = here / name[1 : found.start(1) - 1]
        if was_moved_aside and not os.path.lexists(target):
            with contextlib.suppress(OSError):
                os.rename(here / name, target)
        else:
            _remove_unless_locked(here / name)


def _remove_unless_locked(leftover: Path) -> None:
    with contextlib.suppress(ImportError, OSError):  # OSError: locked by a running writer, or gone
        if leftover.is_symlink():  # cannot be locked; a running process recreates its link
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
    """Inside the block, convert torch's RuntimeError for a failed write (such as a full disk) to an OSError.

    Raises:
        OSError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        raise_interruption(error)
        words = ("inline_container", "PytorchStreamWriter", "iostream")
        if not any(word in str(error) for word in words):
            raise
        number = errno.ENOSPC if shutil.disk_usage(folder).free < 2**20 else errno.EIO
        raise explain(OSError(number, os.strerror(number)), folder / INDEX) from error


def raise_interruption(error: RuntimeError) -> None:
    """If a KeyboardInterrupt or similar interrupted ``torch.save``, raise it in place of torch's error."""
    interruption = error.__context__
    if interruption is not None and not isinstance(interruption, Exception):
        raise interruption.with_traceback(None) from None


def explain(error: OSError, target: Path) -> OSError:
    """Return an error of the same class, whose message explains why `target` could not be written and what to do."""
    earlier = "the earlier file is intact" if target.is_file() else "no earlier file exists"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            earlier = f"{shutil.disk_usage(target.parent).free / 2**20:.0f} MiB are free; {earlier}"
        reason = f"the disk is full ({os.strerror(error.errno)}; {earlier}). Free space, or choose another folder"
    elif target.is_dir():
        reason = "a folder has this name. Choose another name, or move the folder"
    else:
        cause = error.strerror or str(error)
        reason = f"its folder is not writable ({cause}; {earlier}). Choose another folder, or change permissions"
    return type(error)(error.errno or errno.EIO, f"could not write {str(target)!r}: {reason}")


@contextlib.contextmanager
def reading(path: PathLike | IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a file for reading; a remote file is first copied to a temporary file.

    A file that is already open is read from its start, and stays open.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: `path` is a folder.
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
    # torch.load seeks often, and each seek in a remote file may be a request
    with system.open(name, "rb") as source, tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy, 1 << 22)
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def opened(path: PathLike) -> Iterator[IO[bytes]]:
    """Open a file to read parts of its content. A remote file is read directly, without a copy.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    if is_remote(path):
        system, name = _remote(path)
        with system.open(name, "rb") as file:
            yield file
    else:
        with open(local(path), "rb") as file:
            yield file


def make_folder(folder: PathLike) -> None:
    """Create a folder and its parents, if they do not exist."""
    if is_remote(folder):
        system, name = _remote(folder)
        system.makedirs(name, exist_ok=True)
    else:
        local(folder).mkdir(parents=True, exist_ok=True)


def create(path: PathLike) -> IO[bytes]:
    """Open a new binary file for writing in an existing folder; the caller closes the file."""
    if is_remote(path):
        system, name = _remote(path)
        file: IO[bytes] = system.open(name, "wb")
        return file
    return open(local(path), "wb")


def is_file(path: PathLike) -> bool:
    """Return True if `path` is a file."""
    if is_remote(path):
        system, name = _remote(path)
        return bool(system.isfile(name))
    return local(path).is_file()


def exists(path: PathLike) -> bool:
    """Return True if `path` is a file or a complete folder; False for a broken link or an unfinished folder."""
    if is_remote(path):
        system, name = _remote(path)
        return bool(system.isfile(name) or (system.isdir(name) and not _is_unfinished(system, name)))
    return local(path).exists()


def size(path: PathLike) -> int:
    """Return the size of a file in bytes."""
    if is_remote(path):
        system, name = _remote(path)
        return int(system.size(name))
    return local(path).stat().st_size


def sizes(folder: PathLike) -> dict[str, int]:
    """Return the size in bytes of each file in `folder` and its subfolders, by relative path."""
    if is_remote(folder):
        system, name = _remote(folder)
        found = system.find(name, detail=True)
        return {path[len(name) :].lstrip("/"): int(each["size"]) for path, each in found.items()}
    here = local(folder)
    return {each.relative_to(here).as_posix(): each.stat().st_size for each in here.rglob("*") if each.is_file()}


def modified(path: PathLike) -> float:
    """Return a file's modification time, in seconds since 1970."""
    if is_remote(path):
        if is_index_folder(path):
            return modified(inside(path, INDEX))
        system, name = _remote(path)
        return float(system.modified(name).timestamp())
    return local(path).stat().st_mtime


def names(folder: PathLike) -> list[str]:
    """Return the sorted names of the complete entries in `folder`; empty if the folder does not exist."""
    if is_remote(folder):
        system, name = _remote(folder)
        entries = system.ls(name, detail=True) if system.isdir(name) else []
        whole = [each for each in entries if each["type"] != "directory" or not _is_unfinished(system, each["name"])]
        found = [os.path.basename(each["name"].rstrip("/")) for each in whole]
    else:
        found = os.listdir(local(folder)) if local(folder).is_dir() else []
    return sorted(name for name in found if not name.endswith(UNFINISHED))


def remove(path: PathLike) -> None:
    """Delete a file, a link, or a folder with an index; do nothing if `path` does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            system, name = _remote(path)
            has_index = is_index_folder(path)
            if has_index:
                system.rm(f"{name}/{INDEX}")  # so that a killed process leaves nothing that looks complete
            system.rm(name, recursive=has_index or (system.isdir(name) and _is_unfinished(system, name)))
            return
        here = local(path)
        if not here.is_symlink() and is_index_folder(here):
            # in one step, so that a killed process leaves no partial folder under this name
            hidden = here.with_name(f"{_stem(here)}{secrets.token_hex(4)}{UNFINISHED}")
            os.rename(here, hidden)
            (hidden / INDEX).unlink(missing_ok=True)  # a leftover without an index is not a checkpoint
            _remove_tree(hidden)
        else:
            here.unlink()


def rename(path: PathLike, new: PathLike) -> None:
    """Rename a file; an existing local file with the new name is replaced."""
    if is_remote(path):
        system, name = _remote(path)
        system.mv(name, _remote(new)[1])
    else:
        os.replace(local(path), local(new))


def lies_in(path: PathLike, folder: PathLike) -> bool:
    """Return True if `path` is in `folder` or a subfolder, after resolving links in the parents."""
    if is_remote(path) or is_remote(folder):
        # compared as text, so that a part such as ".." must not lead out of the folder
        parts, outer = str(path).split("/"), str(folder).rstrip("/").split("/")
        return len(parts) > len(outer) and parts[: len(outer)] == outer and not {"..", ".", ""} & {*parts[len(outer) :]}
    here = local(path)
    if here.name in ("", ".."):
        return False
    return Path(os.path.realpath(folder)) in (Path(os.path.realpath(here.parent)) / here.name).parents


def link(path: PathLike, target: PathLike) -> None:
    """Create or replace the symbolic link `path`, with a relative path to the local file or folder `target`.

    Unfinished files of a killed process are removed, as by :func:`replacing`.
    """
    name, destination = local(path).absolute(), local(target).absolute()
    temporary, leads_to = _temporary_path(name), os.path.relpath(destination, name.parent)
    while True:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(leads_to)
        try:
            _take_place(temporary, name)
        except FileNotFoundError:  # another writer of the same name removed it as a leftover
            continue
        break
    _remove_leftovers(name)


def check_writable(folder: PathLike) -> None:
    """Raise if `folder` is not writable, or if it does not exist and cannot be created. Nothing is written.

    Raises:
        OSError: the folder is not writable; the message has the reason. URLs are not checked.
    """
    if is_remote(folder):
        return
    wanted = local(folder).absolute()
    ancestor = wanted
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, f"the folder {str(wanted)!r} cannot be created, because {str(ancestor)!r} is a file"
        )
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise PermissionError(
            errno.EACCES,
            f"the folder {str(wanted)!r} is not writable, because permission is missing in {str(ancestor)!r}. "
            "Choose another",
        )
