"""A rank's trace: its newest collectives, in memory that others can read while the rank is stopped, deaf or dead.

The memory has no name: it goes when nobody maps it any more. Who watches the ranks opens it by way of ``/proc`` and
then holds it itself. Nothing here needs torch.

Layout: a header (magic number, count of notes, length of the words; when a device was last looked at),
`ENTRIES` notes of 64 bytes each, written round and round, and the *words*: what notes name by a number (operations,
groups, shapes, places, phases), one line of JSON each, in the order in which they were first seen.
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
"""Notes that are kept. A power of two."""
WORDS = 2**18
"""Bytes of words. What finds no place is word 0 of its kind: unknown."""
KINDS = ("operation", "group", "payload", "location", "phase")

ENTRY = struct.Struct("=qqIIHHHHiiddd")
_MAGIC = 0x6C6F636B73746570
_HEADER = 64
_SIZE = _HEADER + ENTRIES * ENTRY.size + WORDS
_MASK = ENTRIES - 1
# places of 8 bytes in the header, and in a note
_COUNT, _LENGTH = 1, 2
_WATCHED = 3
_FIRST = _HEADER // 8
_LEFT, _DONE = 6, 7
_ENTERED = 10
"""Which of a note's values is the time of its begin."""

_FLAGS = 15
"""Which of a note's values of 2 bytes are its flags."""

WHOLE, MESSAGE, ASIDE, QUEUED = 1, 2, 4, 8
"""Flags of a note: see `Note`."""

LAG = 1.5
"""Seconds after which it is noted at the latest that a device is done with a collective, while its process is well."""


_NUMBER = 40
"""Bits of a note's number that count; above them stands what has passed by the gate."""


def passed(before: int, number: int, count: int) -> int:
    """What has passed by the gate of a group so far, in a few bits: alike on ranks by which the same has passed.

    Args:
        before: what had passed until now.
        number: of the last collective that came by the gate.
        count: how many have passed since.
    """
    mixed = (before >> _NUMBER) * 1_000_003 ^ number * 8191 ^ count
    return ((mixed ^ mixed >> 23) & 2**22 - 1 or 1) << _NUMBER


class Members(tuple[int, ...]):
    """The ranks of a group. It may have thousands, and be a part of thousands of keys: its hash is computed once."""

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
    """The object that stands for these ranks wherever they are met."""
    return Members(members)


@dataclass(frozen=True)
class Note:
    """One collective of a rank, as its trace has it. Times are on the clock of ``time.monotonic``."""

    index: int  #: counted over all notes of the rank, from 1
    number: int  #: counted over the collectives of the group; 0 for a message from rank to rank
    operation: str  #: "all_reduce"
    group: str  #: the name of the group, the same on all its ranks
    members: tuple[int, ...]  #: ranks of the group
    payload: str  #: "float32 (4, 8) SUM"
    elements: int  #: of the tensor; -1 where there is none, or ranks may differ
    location: str  #: "train.py:88"; "" where lockstep made the call by itself
    function: str  #: of that line
    phase: str  #: the hook in which it was called, where the Trainer knows one
    batch: int  #: -1: none
    root: int  #: source or destination; -1: none
    entered: float
    left: float | None  #: None: the rank is inside
    done: float | None  #: None: not known to be complete. What waits for its end is complete when it is left
    whole: bool  #: whether it is known what the group did until then, so that numbers can be compared
    aside: bool = False  #: whether another thread than the one that trains has made it
    queued: bool = False  #: whether it is in the queue of the rank's device, which was not seen to be done with it

    @property
    def inside(self) -> bool:
        """Whether the rank has not come out of the call."""
        return self.left is None

    @property
    def named(self) -> str:
        """``"all_reduce #417"``."""
        return f"{self.operation} #{self.number}" if self.number else self.operation

    def differs(self, other: Note) -> bool:
        """Whether two ranks did different things as the same collective of one group; then their calls do not match."""
        mine, theirs = self._matched, other._matched
        return mine != theirs and any(a != b and None not in (a, b) for a, b in zip(mine, theirs, strict=True))

    def clashes(self, other: Note) -> bool:
        """Whether two ranks gave one collective other numbers of bytes where gloo wants the same. It ends the process
        then (SIGABRT); other backends may gather what is uneven, so this alone proves nothing."""
        alike = self.operation == other.operation and self.operation in _OF_ONE_SIZE
        return alike and None not in (self._bytes, other._bytes) and self._bytes != other._bytes

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
        elements = None if self.elements < 0 or self.operation not in _ALIKE else self.elements
        dtype_too = dtype if self.operation in _REDUCING and dtype else None
        root = None if self.root < 0 else self.root
        return self.operation, elements, dtype_too, operation, root


_REDUCING = ("all_reduce", "reduce")
_ALIKE = ("all_reduce", "reduce", "broadcast")
_OF_ONE_SIZE = ("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter")
_BITS = re.compile(r"(?:bool|[a-z]+(\d+))")


class TraceMemory:
    """The side that writes; a process has one, see `own`.

    Attributes:
        address: where others find the memory; "" on a system without ``/proc``.
        enter: ``enter(number, payload, place, operation, group, phase, flags, batch, root)`` notes that a collective
            begins, words by their numbers, and gives the note's index.
        leave: ``leave(index, complete)`` notes that the call is over, and whether the collective is too.
        complete: ``complete(index)`` notes that an asynchronous collective has been waited for.
        queue: ``queue(index)`` notes that the collective is in a device's queue, and that its end there will be noted.
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
        self._numbers: dict[bytes, int] = {}  # no longer than the words: a later fit of the process has the same ones
        self._full: set[str] = set()
        self._lock = threading.RLock()  # a signal's handler may have a word, too
        self.enter, self.leave, self.complete, self.queue = _writers(self._memory, self._longs, self._times, shorts)

    def word(self, kind: str, *value: object) -> int:
        """The number of a word, which is written down where it is new; 0 where there is no place for it.

        Args:
            kind: one of `KINDS`.
            value: what JSON knows.
        """
        line = json.dumps([kind, *value]).encode() + b"\n"
        known = self._numbers.get(line)
        if known is not None or kind in self._full:
            return known or 0
        with self._lock:  # whoever reads counts the lines
            length = self._longs[_LENGTH]
            # shapes may be without number: what else there is finds its place
            if length + len(line) > (WORDS // 2 if kind == "payload" else WORDS) or self._counts[kind] >= 65535:
                self._full.add(kind)
                return 0
            begin = _SIZE - WORDS + length
            self._memory[begin : begin + len(line)] = line
            self._longs[_LENGTH] = length + len(line)
            number = self._counts[kind] = self._numbers[line] = self._counts[kind] + 1
            return number

    def watched(self) -> None:
        """Note that the ends of all queued collectives that a device is done with by now have been noted."""
        self._times[_WATCHED] = time.monotonic()


def _writers(
    memory: mmap.mmap, longs: memoryview, times: memoryview[float], shorts: memoryview
) -> tuple[Callable[..., int], Callable[[int, bool], None], Callable[[int], None], Callable[[int], None]]:
    """What runs at each collective: functions of local names, since looking things up costs more than writing."""
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
        if longs[at] == index:  # not so long ago that another has its place
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
    """The trace of this process, made when it is first asked for."""
    global _own
    if _own is None or _own[0] != os.getpid():  # a forked process has one of its own
        _own = os.getpid(), TraceMemory()
    return _own[1]


def offer() -> str:
    """Let other processes read this one's trace.

    Returns:
        where it lies: what `Reading` wants to know. "" where a system cannot do that.
    """
    return own().address


class Reading:
    """The trace of another process, opened while that still runs, readable for as long as this object lives.

    Args:
        address: what the process' `offer` returned.

    Raises:
        OSError, ValueError: there is no trace.
    """

    def __init__(self, address: str) -> None:
        path, _, inode = address.partition(":")
        with open(path, "rb") as file:
            if str(os.fstat(file.fileno()).st_ino) != inode:
                raise OSError(f"{path} is no trace")
            self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        if self._long(0) != _MAGIC:
            raise OSError(f"{path} is no trace")
        self._length = 0
        self._words: dict[str, list[list[Any]]] = {kind: [] for kind in KINDS}
        self._members: dict[int, Members] = {}

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    @property
    def count(self) -> int:
        """How many notes were made so far."""
        return self._long(_COUNT)

    @property
    def is_watched(self) -> bool:
        """Whether it is noted which queued collectives a device is done with; not where a process is stopped or holds
        the interpreter's lock."""
        at = struct.unpack("=d", self._memory[8 * _WATCHED : 8 * _WATCHED + 8])[0]
        return bool(time.monotonic() - at < 2 * LAG)

    def newest(self, most: int = 8) -> list[Note]:
        """The newest notes, the newest first."""
        return self.notes(self.count - most + 1)[::-1]

    def notes(self, first: int) -> list[Note]:
        """Notes from the index ``first`` on, in order, as far as they are still there."""
        count = self.count
        found = (self._note(index) for index in range(max(1, first, count - ENTRIES + 2), count + 1))
        return [note for note in found if note is not None]

    def _note(self, index: int) -> Note | None:
        at = _HEADER + (index & _MASK) * ENTRY.size
        raw = self._memory[at : at + ENTRY.size]
        if self._memory[at : at + ENTRY.size] != raw:  # it is just being written
            raw = self._memory[at : at + ENTRY.size]
        values = ENTRY.unpack(raw)
        if values[0] != index or not values[_ENTERED]:  # the time is written last: a half-written note has none
            return None
        _, number, payload, location, operation, group, phase, flags, batch, root, entered, left, done = values
        text, elements = self._word("payload", payload, ["", -1])
        file, line, function = self._word("location", location, ["", 0, ""])
        name, members = self._word("group", group, ["", []])
        number, behind = number & 2**_NUMBER - 1, number >> _NUMBER
        return Note(
            index=index,
            number=number,
            operation=self._word("operation", operation, ["a collective"])[0],
            group=f"{name}~{behind:x}" if behind else name,  # compared with those by which the same has passed
            members=self._members_of(group, members),
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

    def _members_of(self, word: int, members: list[int]) -> Members:
        found = self._members.get(word)
        if found is None:
            found = shared(tuple(members))
            if members:
                self._members[word] = found
        return found

    def _word(self, kind: str, number: int, unknown: list[Any]) -> list[Any]:
        words = self._words[kind]
        if number > len(words):
            self._read_words()
        return words[number - 1] if 0 < number <= len(words) else unknown

    def _read_words(self) -> None:
        length = self._long(_LENGTH)
        begin = _SIZE - WORDS
        for line in self._memory[begin + self._length : begin + length].splitlines():
            kind, *value = json.loads(line)
            self._words[kind].append(value)
        self._length = length

    def _long(self, location: int) -> int:
        return int.from_bytes(self._memory[8 * location : 8 * location + 8], sys.byteorder)
