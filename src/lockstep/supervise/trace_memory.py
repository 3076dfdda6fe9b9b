"""The trace: a rank's newest collectives, in shared memory.

The supervisor can read the trace even if the rank is blocked or dead.

Layout: a header (magic number, number of notes, length of the words, time of the last check of a device), a ring buffer
of `ENTRIES` notes of 64 bytes each, and the *words*. Notes refer to words (operations, groups, shapes, locations,
phases) by number. A word is one line of JSON, and they are ordered by first use.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ENTRIES = 2048
"""Number of notes in the ring buffer. A power of two."""
WORDS = 2**18
"""Size of the words in bytes. A word that does not fit is word 0 of its kind: unknown."""
KINDS = ("operation", "group", "payload", "location", "phase")

ENTRY = struct.Struct("=qqIIHHHHiiddd")
_MAGIC = 0x6C6F636B73746570
_HEADER = 64
_SIZE = _HEADER + ENTRIES * ENTRY.size + WORDS
_MASK = ENTRIES - 1
# indices of 8-byte values in the header, and in a note
_COUNT, _LENGTH = 1, 2
_WATCHED = 3
_FIRST = _HEADER // 8
_LEFT, _DONE = 6, 7
_ENTERED = 10
"""Index of the entry time among a note's values."""

_FLAGS = 15
"""Index of the flags among a note's 2-byte values."""

WHOLE, MESSAGE, ASIDE, QUEUED = 1, 2, 4, 8
"""Flags of a note, see `Note`."""

LAG = 1.5
"""Maximum seconds until a completed collective of a device is recorded, while its process runs normally."""


_NUMBER = 40
"""Number of bits of a note's number. The bits above are a hash of the collectives that bypassed the trace."""


def passed(before: int, number: int, count: int) -> int:
    """Return an updated hash of the points at which collectives of a group have bypassed the trace.

    Ranks with the same history have equal hashes.

    Args:
        before: previous hash.
        number: number of the last recorded collective.
        count: number of collectives that have bypassed the trace since.
    """
    mixed = (before >> _NUMBER) * 1_000_003 ^ number * 8191 ^ count
    return ((mixed ^ mixed >> 23) & 2**22 - 1 or 1) << _NUMBER


class Members(tuple[int, ...]):
    """The ranks of a process group, as a tuple whose hash is computed only once.

    Thousands of dict keys may contain the tuple of a large group.
    """

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("hash")
        if found is None:
            found = self.__dict__["hash"] = super().__hash__()
        return found

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other


@functools.lru_cache(maxsize=4096)
def shared(members: tuple[int, ...]) -> Members:
    """Return the `Members` object for these ranks. Equal arguments return the same object."""
    return Members(members)


@dataclass(frozen=True)
class Note:
    """Record of one collective in a rank's trace. All times are on the clock of ``time.monotonic``."""

    index: int  #: index among all notes of the rank, from 1
    number: int  #: index among the collectives of the group; 0 for point-to-point messages
    operation: str  #: "all_reduce"
    group: str  #: name of the group, the same on all its ranks
    members: tuple[int, ...]  #: ranks of the group
    payload: str  #: "float32 (4, 8) SUM"
    elements: int  #: number of elements of the tensor; -1 without one, or where ranks may differ
    location: str  #: "train.py:88"; "" if lockstep made the call by itself
    function: str  #: function of that line
    phase: str  #: the hook that called it, if known to the Trainer
    batch: int  #: -1: none
    root: int  #: source or destination; -1: none
    entered: float
    left: float | None  #: None: the rank is still inside
    done: float | None  #: None: not known to be complete. Blocking calls are complete when they return
    whole: bool  #: whether the group's history is fully known, so that numbers are comparable
    aside: bool = False  #: whether a thread other than the training thread made it
    queued: bool = False  #: whether it is in the queue of the rank's device and not known to be complete

    @property
    def inside(self) -> bool:
        """True if the rank's call of the collective has not returned yet."""
        return self.left is None

    @property
    def name(self) -> str:
        """The collective's name and number, such as ``"all_reduce #417"``."""
        return f"{self.operation} #{self.number}" if self.number else self.operation

    def differs(self, other: Note) -> bool:
        """Return True if two ranks' calls of one collective do not match."""
        mine, theirs = self._matched, other._matched
        return mine != theirs and any(a != b and None not in (a, b) for a, b in zip(mine, theirs, strict=True))

    def clashes(self, other: Note) -> bool:
        """Return True if two ranks passed different sizes to one collective for which gloo requires equal sizes.

        Gloo then aborts the process (SIGABRT). Other backends may support uneven sizes, so this is no proof by itself.
        """
        same = self.operation == other.operation and self.operation in _OF_ONE_SIZE
        return same and None not in (self._bytes, other._bytes) and self._bytes != other._bytes

    @property
    def _bytes(self) -> int | None:
        bits = _BITS.match(self.payload)
        if bits is None or self.elements < 0:
            return None
        return self.elements * (int(bits[1]) // 8 if bits[1] else 1)

    @functools.cached_property
    def _matched(self) -> tuple[Any, ...]:
        dtype, _, rest = self.payload.partition(" ")
        operation: str | None = rest.rpartition(") ")[2] if self.operation in _REDUCING else None
        if operation in ("", "?"):
            operation = None
        elements = None if self.elements < 0 or self.operation not in _EQUAL_SIZES else self.elements
        dtype_too = dtype if self.operation in _REDUCING and dtype else None
        root = None if self.root < 0 else self.root
        return self.operation, elements, dtype_too, operation, root


_REDUCING = ("all_reduce", "reduce")
_EQUAL_SIZES = ("all_reduce", "reduce", "broadcast")
_OF_ONE_SIZE = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter")
_BITS = re.compile(r"(?:bool|[a-z]+(\d+))")


class TraceMemory:
    """The trace of this process, into which wrappers write its collectives. `own` returns it.

    Attributes:
        address: address of the memory for other processes; "" on systems without ``/proc``.
        enter: ``enter(number, payload, place, operation, group, phase, flags, batch, root)`` records the start of a
            collective, with words by their numbers, and returns the note's index.
        leave: ``leave(index, complete)`` records that the call has ended, and whether the collective is complete.
        complete: ``complete(index)`` records that an asynchronous collective was waited for.
        queue: ``queue(index)`` records that the collective is in a device's queue, and that its end will be recorded.
    """

    def __init__(self) -> None:
        self.address, handle = "", -1
        if sys.platform.startswith("linux"):
            handle = os.memfd_create("lockstep-trace")
            os.truncate(handle, _SIZE)
            self.address = f"/proc/{os.getpid()}/fd/{handle}:{os.fstat(handle).st_ino}"
        self._memory = mmap.mmap(handle, _SIZE)
        view = memoryview(self._memory)[: _SIZE - WORDS]
        self._longs, self._times, shorts = view.cast("q"), view.cast("d"), view.cast("H")
        self._longs[0] = _MAGIC
        self._counts = dict.fromkeys(KINDS, 0)
        self._numbers: dict[bytes, int] = {}  # not longer than the words: later fits of the process use the same ones
        self._full: set[str] = set()
        self._lock = threading.RLock()  # reentrant: a signal handler may add a word, too
        self.enter, self.leave, self.complete, self.queue = _writers(self._memory, self._longs, self._times, shorts)

    def word(self, kind: str, *value: object) -> int:
        """Return the number of a word (text) in the trace. Store the word if it is new. Return 0 if the memory is full.

        Args:
            kind: one of `KINDS`.
            value: JSON data.
        """
        line = json.dumps([kind, *value]).encode() + b"\n"
        known = self._numbers.get(line)
        if known is not None or kind in self._full:
            return known or 0
        with self._lock:  # readers count the lines
            length = self._longs[_LENGTH]
            # the number of shapes is unbounded: reserve space for the other kinds
            if length + len(line) > (WORDS // 2 if kind == "payload" else WORDS) or self._counts[kind] >= 65535:
                self._full.add(kind)
                return 0
            start = _SIZE - WORDS + length
            self._memory[start : start + len(line)] = line
            self._longs[_LENGTH] = length + len(line)
            number = self._counts[kind] = self._numbers[line] = self._counts[kind] + 1
            return number

    def watched(self) -> None:
        """Record the current time as the time of the last check for collectives that devices have completed."""
        self._times[_WATCHED] = time.monotonic()


def _writers(
    memory: mmap.mmap, longs: memoryview, times: memoryview[float], shorts: memoryview
) -> tuple[Callable[..., int], Callable[[int, bool], None], Callable[[int], None], Callable[[int], None]]:
    """Return the functions of `TraceMemory` that record collectives. They use local names for speed."""
    clock, counter, write = time.monotonic, itertools.count(1), ENTRY.pack_into

    def enter(
        number: int,
        payload: int,
        location: int,
        operation: int,
        group: int,
        phase: int,
        flags: int,
        batch: int,
        root: int,
    ) -> int:
        index = next(counter)
        at = _HEADER + (index & _MASK) * 64
        now = clock()
        write(memory, at, index, number, payload, location, operation, group, phase, flags, batch, root, now, 0.0, 0.0)
        longs[_COUNT] = index
        return index

    def leave(index: int, complete: bool) -> None:
        at = _FIRST + (index & _MASK) * 8
        if longs[at] == index:  # another note may have overwritten it
            now = times[at + _LEFT] = clock()
            if complete:
                times[at + _DONE] = now

    def complete(index: int) -> None:
        at = _FIRST + (index & _MASK) * 8
        if longs[at] == index:
            times[at + _DONE] = clock()

    def queue(index: int) -> None:
        at = index & _MASK
        if longs[_FIRST + at * 8] == index:
            shorts[4 * _FIRST + at * 32 + _FLAGS] |= QUEUED

    return enter, leave, complete, queue


_own: tuple[int, TraceMemory] | None = None


def own() -> TraceMemory:
    """Return the trace of this process. Create it on first use."""
    global _own
    if _own is None or _own[0] != os.getpid():  # a forked process creates its own
        _own = os.getpid(), TraceMemory()
    return _own[1]


def offer() -> str:
    """Return the address at which other processes can read the trace of this process.

    Returns:
        the address for `Reading`; "" on systems without support.
    """
    return own().address


class Reading:
    """Reader of another process's trace. Open it while that process runs; it works after that process has ended.

    Args:
        address: return value of the process' `offer`.

    Raises:
        OSError, ValueError: there is no trace at the address.
    """

    def __init__(self, address: str) -> None:
        path, _, inode = address.partition(":")
        with open(path, "rb") as file:
            if str(os.fstat(file.fileno()).st_ino) != inode:
                raise OSError(f"{path} is not a trace of collectives")
            self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        if self._long(0) != _MAGIC:
            raise OSError(f"{path} is not a trace of collectives")
        self._length = 0
        self._words: dict[str, list[list[Any]]] = {kind: [] for kind in KINDS}
        self._members: dict[int, Members] = {}

    def close(self) -> None:
        """Release the memory of the trace."""
        self._memory.close()

    @property
    def count(self) -> int:
        """Number of collectives that the process has recorded so far."""
        return self._long(_COUNT)

    @property
    def is_watched(self) -> bool:
        """True if the process currently records which queued collectives its device has completed.

        It does not while it is stopped or while one thread holds the interpreter's lock.
        """
        at = struct.unpack("=d", self._memory[8 * _WATCHED : 8 * _WATCHED + 8])[0]
        return bool(time.monotonic() - at < 2 * LAG)

    def newest(self, most: int = 8) -> list[Note]:
        """Return the notes of the ``most`` newest collectives, the newest first."""
        return self.notes(self.count - most + 1)[::-1]

    def notes(self, first: int) -> list[Note]:
        """Return the notes of collectives from index ``first`` on that are still in the ring buffer, in order."""
        count = self.count
        found = (self._note(index) for index in range(max(1, first, count - ENTRIES + 2), count + 1))
        return [note for note in found if note is not None]

    def _note(self, index: int) -> Note | None:
        at = _HEADER + (index & _MASK) * ENTRY.size
        raw = self._memory[at : at + ENTRY.size]
        if self._memory[at : at + ENTRY.size] != raw:  # it is being written
            raw = self._memory[at : at + ENTRY.size]
        values = ENTRY.unpack(raw)
        # the time is written last: an incomplete note has none
        if values[0] != index or not values[_ENTERED]:
            return None
        _, number, payload, location, operation, group, phase, flags, batch, root, entered, left, done = values
        text, elements = self._word("payload", payload, ["", -1])
        file, line, function = self._word("location", location, ["", 0, ""])
        name, members = self._word("group", group, ["", []])
        found = self._members.get(group)
        if found is None:
            found = shared(tuple(members))
            if members:  # a word that is not written yet has none
                self._members[group] = found
        number, bypassed = number & 2**_NUMBER - 1, number >> _NUMBER
        return Note(
            index=index,
            number=number,
            operation=self._word("operation", operation, ["a collective"])[0],
            # comparable only with the same history
            group=f"{name}~{bypassed:x}" if bypassed else name,
            members=found,
            payload=text,
            elements=elements,
            location=f"{file}:{line}" if file else "",
            function=function,
            phase=self._word("phase", phase, [""])[0],
            batch=batch,
            root=root,
            entered=entered,
            left=left or None,
            done=done or None,
            whole=bool(flags & WHOLE),
            aside=bool(flags & ASIDE),
            queued=bool(flags & QUEUED) and not done,
        )

    def _word(self, kind: str, number: int, unknown: list[Any]) -> list[Any]:
        words = self._words[kind]
        if number > len(words):
            # read what was added since the last call
            length = self._long(_LENGTH)
            start = _SIZE - WORDS
            for line in self._memory[start + self._length : start + length].splitlines():
                its_kind, *value = json.loads(line)
                self._words[its_kind].append(value)
            self._length = length
        return words[number - 1] if 0 < number <= len(words) else unknown

    def _long(self, location: int) -> int:
        return int.from_bytes(self._memory[8 * location : 8 * location + 8], sys.byteorder)
