"""Reading and writing of checkpoint files: torch's zip format without code, followed by a SHA-256 digest.

Layout: the archive as ``torch.save`` writes it. Its comment (the last field of a zip file) is

    ``LOCKSTEP-SHA256\\0`` (16 bytes), SHA-256 of everything before the digest (32 bytes)

so that ``torch.load`` and any other reader of zip files can still read it. The dict in it has the key
``"lockstep"`` with the version of the format: a file with the version but without the comment is damaged, too.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import errno
import hashlib
import json
import pickle
import struct
import sys
import zipfile
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from lockstep.checkpoint import storage
from lockstep.checkpoint.damage import check_archive_size, first_line
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.installed import LIGHTNING
from lockstep.ground.rank import warn_once
from lockstep.ground.tree import LEAVES, TENSORS, can_be_read_back, described

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

#: Version of the keys and their meaning, in ``checkpoint["lockstep"]["format"]``.
FORMAT = 1
#: Key with the format's version; its presence means that the file must end with a digest.
KEY = "lockstep"

_NO_COMMENT = struct.pack("<H", 0)
_DIGEST_BYTES = 32
_MARK = b"LOCKSTEP-SHA256\0"
#: bytes before the digest: the length of the comment, and the mark
_SEAL = struct.pack("<H", len(_MARK) + _DIGEST_BYTES) + _MARK
_WAY_OUT = "Resume from an earlier checkpoint, or copy the file again."


def save(checkpoint: dict[str, Any], path: storage.PathLike) -> None:
    """Write a checkpoint atomically, after checking that :func:`load` can read every value.

    Tensors, numbers, strings, and dicts, lists, tuples, sets of them are kept. A NumPy number becomes a
    Python number and an ``AttributeDict`` a dict. Classes registered by ``torch.serialization.add_safe_globals``
    are kept, too. The key ``"lockstep"`` (a dict, if given) gets the version of the format.

    With Lightning's names (`lockstep.lightning`) other objects are pickled, as in Lightning, with a warning.

    Raises:
        MisconfigurationException: ``torch.load(weights_only=True)`` could not read something in it; the
            message names its key. No file has been changed.
        OSError: the file could not be written; the earlier one is intact.
    """
    content = with_version(checkpoint)
    with storage.replacing(path) as file:
        write(content, file)


def with_version(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `checkpoint` with the format's version added, and with values converted by `readable`."""
    return readable({**checkpoint, KEY: {**checkpoint.get(KEY, {}), "format": FORMAT}})


def write(content: dict[str, Any], file: IO[bytes]) -> None:
    """Write ``content``, a result of `with_version`, to an open file, and append the digest.

    Raises:
        OSError: the file could not be written.
    """
    writer = _HashingWriter(file)
    try:
        torch.save(content, cast("IO[bytes]", writer))  # it only writes and flushes
    except RuntimeError as error:
        storage.raise_interruption(error)
        if writer.error is None:
            raise
    if writer.error is not None:  # torch reports a failed write by a position in its own source
        raise writer.error
    writer.seal()


class _HashingWriter:
    """A file-like object for ``torch.save`` that hashes all bytes and writes them to another file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None
        self._hash = hashlib.sha256()
        self._last = b""  # the last two bytes are held back: the length of the comment replaces them

    def write(self, data: memoryview) -> int:
        # after an error all data count as written: torch would raise an error without the reason
        written, held_back = len(data), len(_NO_COMMENT)
        if self.error is None:
            if written < held_back:
                data = memoryview(self._last + bytes(data))
            else:
                self._pass_on(self._last)
            self._pass_on(data[:-held_back])
            self._last = bytes(data[-held_back:])
        return written

    def _pass_on(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error

    def flush(self) -> None:
        """Do nothing, because the complete file is flushed later."""

    def seal(self) -> None:
        """Append the digest as the zip archive's comment."""
        assert self._last == _NO_COMMENT, "torch.save ended its archive with a comment of its own"
        self._hash.update(_SEAL)
        self.file.write(_SEAL + self._hash.digest())


def load(
    path: storage.PathLike | IO[bytes], map_location: MAP_LOCATION = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint file from lockstep or Lightning 2.x, after checking that the file is intact.

    Args:
        path: the file, local or a URL, or an open file.
        map_location: device of its tensors, as in ``torch.load``.
        weights_only: False allows the file to run code while it is read: only for a file whose author you
            trust. True allows tensors and plain values only; so does None, unless
            TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1.

    Raises:
        CorruptCheckpoint: the file is truncated or altered, or is not a checkpoint.
        MisconfigurationException: the file contains objects of other classes, which need ``weights_only=False``.
        FileNotFoundError: the file does not exist.
    """
    name = str(path)
    try:
        with storage.reading(path) as file:
            return _load(file, name, map_location, weights_only)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, f"there is no checkpoint {name!r}. Check the path") from None
    except IsADirectoryError as error:
        raise IsADirectoryError(error.errno, f"the checkpoint {name!r} is a folder, not a file") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise CorruptCheckpoint(f"There is no checkpoint at {name!r}: {error.strerror}. {_WAY_OUT}") from None


def _load(file: IO[bytes], name: str, map_location: MAP_LOCATION, weights_only: bool | None) -> dict[str, Any]:
    check_archive_size(file, name)
    sealed = _check_seal(file, name)
    if not sealed:  # one of Lightning's, or damaged: the sums within the archive are all there is to check
        _check_archive(file, name)
    file.seek(0)
    checkpoint = _unpickle(file, name, map_location, weights_only)
    if not isinstance(checkpoint, dict):
        raise CorruptCheckpoint(
            f"The file {name!r} contains a {type(checkpoint).__name__}, but a checkpoint is a dict. Check the path."
        )
    own = checkpoint.get(KEY)
    if isinstance(own, dict) and "format" in own and not sealed:
        # A file that a user has read, changed and saved by torch.save has no hash either, but it ends with the 22 bytes
        # of the zip directory's last record.
        file.seek(max(0, file.seek(0, 2) - 22))
        if file.read(4) != b"PK\x05\x06":
            raise CorruptCheckpoint(f"The checkpoint {name!r} lacks the hash at its end. {_WAY_OUT}")
    return checkpoint


def _unpickle(file: IO[bytes], name: str, map_location: MAP_LOCATION, weights_only: bool | None) -> Any:
    """Read an open file with ``torch.load``, and convert its errors to messages about the checkpoint."""
    try:
        with torch.serialization.safe_globals(_LIGHTNING_DICTS):
            return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        file.seek(0)
        foreign: list[str] = []
        with contextlib.suppress(Exception):  # a damaged pickle may raise anything in the scanner
            foreign = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        if foreign:
            raise MisconfigurationException(
                f"The checkpoint {name!r} contains objects that are not tensors or plain values: {', '.join(foreign)}. "
                "If you trust its author, load it with weights_only=False (code in it may run), or allow these classes "
                "with torch.serialization.add_safe_globals([...]). If a package calls torch.load, set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
            ) from error
        raise CorruptCheckpoint(f"The checkpoint {name!r} is damaged ({error}). {_WAY_OUT}") from error
    except Exception as error:  # torch raises errors of many classes for a damaged archive or pickle
        # a missing device (torch's message mentions map_location), a disk that fails, or code in the file
        if weights_only is False or "map_location" in str(error) or (isinstance(error, OSError) and error.errno):
            raise
        raise CorruptCheckpoint(
            f"The file {name!r} is damaged or not a checkpoint ({first_line(error)}). {_WAY_OUT}"
        ) from error


def _check_seal(file: IO[bytes], name: str) -> bool:
    """Compare the digest at the end of the file with the file's bytes. Return False if there is no digest.

    Raises:
        CorruptCheckpoint: the digest does not match the file's bytes.
    """
    length = file.seek(0, 2)
    covered = length - _DIGEST_BYTES
    file.seek(max(0, covered - len(_SEAL)))
    end = file.read()
    if not (covered >= len(_SEAL) and end.startswith(_SEAL)):
        return False
    file.seek(0)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    while covered > 0:
        # at most what is left, so that the digest itself stays outside
        got = file.readinto(buffer[: min(covered, len(buffer))])  # type: ignore[attr-defined]
        digest.update(buffer[:got])
        covered -= got
        if got == 0:  # the file has become shorter meanwhile
            break
    if digest.digest() != end[-_DIGEST_BYTES:]:
        raise CorruptCheckpoint(
            f"The checkpoint {name!r} has changed since it was written (its bytes do not match its hash). {_WAY_OUT}"
        )
    return True


def _check_archive(file: IO[bytes], name: str) -> None:
    """Raise if a file is not an intact zip archive from ``torch.save``; nothing is unpickled."""
    file.seek(0)
    start = file.read(4)
    if start != b"PK\x03\x04":
        what = "is empty" if not start else "was not written by torch.save (since torch 1.6)"
        raise CorruptCheckpoint(f"The file {name!r} {what}, so it is not a checkpoint. Check the path.")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.namelist()
            for member in archive.infolist():
                if member.CRC:  # 0: disabled by `torch.serialization.set_crc32_options`
                    with archive.open(member) as stream:
                        while stream.read(1 << 20):  # zipfile compares the sum at the end of the member
                            pass
    except Exception as error:  # zipfile and zlib raise many classes
        if isinstance(error, OSError) and error.errno:
            raise
        raise CorruptCheckpoint(
            f"The file {name!r} is truncated or damaged ({first_line(error)}). {_WAY_OUT}"
        ) from error
    if not any(member.endswith("/data.pkl") for member in members):
        raise CorruptCheckpoint(
            f"The zip file {name!r} is not a checkpoint, because it contains no data.pkl. Check the path."
        )


#: Stand-ins for Lightning's classes of nested hyperparameters, which are unpickled as plain dicts. They have the names
#: of the originals, so that Lightning need not be installed.
_LIGHTNING_DICTS: list[Any] = [
    type("AttributeDict", (), {"__module__": module, "__new__": lambda cls, *args: dict(*args)})
    for module in (
        "lightning.fabric.utilities.data",
        "lightning_fabric.utilities.data",
        "lightning.pytorch.utilities.parsing",
        "pytorch_lightning.utilities.parsing",
    )
]


# -- contents of a checkpoint: checked by key before anything is written -------------------------------------


_DICTS: frozenset[Any] = frozenset((dict, collections.OrderedDict, AttributeDict))
_SEQUENCES: frozenset[Any] = frozenset((list, tuple, set))

#: Path of keys from the checkpoint to a value in it.
Keys = tuple[Any, ...]


def readable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Replace values that ``torch.load(weights_only=True)`` cannot read with plain equivalents, or raise.

    The dict itself is returned if nothing changes, else a copy of its containers.

    A NumPy number becomes a Python number, an ``AttributeDict`` a dict. Tensors are neither copied nor inspected.

    Raises:
        MisconfigurationException: ``torch.load(weights_only=True)`` could not read something in it; the
            message contains the value's key, a description, and what to do.
    """
    result = _readable(checkpoint, (), {})
    assert isinstance(result, dict)
    return result


def _readable(value: object, keys: Keys, done: dict[int, tuple[Any, Any]]) -> Any:
    """Convert one value to a form that ``torch.load(weights_only=True)`` can read.

    `done` holds the containers visited so far and their forms, by id: a shared container stays shared, and one
    that contains itself does not recurse forever.
    """
    kind = type(value)
    if kind in LEAVES or (isinstance(value, int) and kind is int and value.bit_length() < 64):
        return value
    if kind in TENSORS:
        if vars(value):  # a tensor is pickled with its Python attributes
            _readable(vars(value), (*keys, "__dict__"), done)
        return value
    if kind not in _DICTS and kind not in _SEQUENCES:
        return _readable_other(value, keys)
    if id(value) not in done:
        done[id(value)] = (value, value)  # with the value itself, whose id must not be used again meanwhile
        if isinstance(value, dict):
            form: Any = _mapping(value, keys, done)
        else:
            items = cast("list[Any]", value)
            forms = [_readable(item, (*keys, index), done) for index, item in enumerate(items)]
            unchanged = all(form is item for form, item in zip(forms, items, strict=True))
            form = value if unchanged else type(items)(forms)
        done[id(value)] = (value, form)
    return done[id(value)][1]


def _mapping(value: dict[Any, Any], keys: Keys, done: dict[int, tuple[Any, Any]]) -> dict[Any, Any]:
    changed = {}
    for key, item in value.items():
        new_key = _readable(key, (*keys, key), done)
        form = _readable(item, (*keys, key), done)
        if form is not item or new_key is not key:
            changed[key] = (new_key, form)
    if isinstance(value, collections.OrderedDict) and vars(value):  # a state_dict keeps its _metadata there
        _readable(vars(value), (*keys, "__dict__"), done)
    if isinstance(value, AttributeDict):
        value = dict(value)
    if not changed:
        return value
    result = copy.copy(value)  # an OrderedDict keeps its attributes
    result.clear()
    for key, item in value.items():
        new_key, form = changed.get(key, (key, item))
        result[new_key] = form
    return result


def _readable_other(value: object, keys: Keys) -> Any:
    """Return the readable form of a value with an uncommon type; test unknown types by saving and loading the value."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item()
        if type(plain) in LEAVES or type(plain) is int:  # dates and long doubles have no plain equivalent
            return plain
    if hasattr(value, "full_tensor"):  # torch would read back only this rank's part of a DTensor, as if it were whole
        raise _error_for(value, keys)
    if isinstance(value, torch.Tensor):  # a subclass; a trial would copy its data
        safe = torch.serialization.get_safe_globals()  # classes, or pairs of a class and its name
        if any(type(value) is (known[0] if isinstance(known, tuple) else known) for known in safe):
            return value
    elif (numpy is None or not isinstance(value, numpy.ndarray)) and can_be_read_back(value):
        return value
    if LIGHTNING.is_installed:  # the script was written for a trainer that pickles anything
        warn_once(
            f"checkpoint{_place(keys)} is {described(value)}: the checkpoint contains objects that are not tensors or "
            "plain values. To load it, pass weights_only=False.",
            key="a checkpoint that holds objects",
        )
        return value
    raise _error_for(value, keys)


def _place(keys: Keys) -> str:
    return "".join(f"[{json.dumps(key)}]" if isinstance(key, str) else f"[{key!r}]" for key in keys)


def _error_for(value: object, keys: Keys) -> MisconfigurationException:
    """Return the error for a value that cannot be saved; `keys` is the path to the value."""
    return MisconfigurationException(
        f"checkpoint{_place(keys)} is {described(value)}, which cannot be saved, because checkpoints contain no code. "
        "Save only tensors, numbers, strings, and dicts, lists or tuples of them. Omit a hyperparameter with "
        "save_hyperparameters(ignore=[...]), or allow a class with torch.serialization.add_safe_globals([...])."
    )
