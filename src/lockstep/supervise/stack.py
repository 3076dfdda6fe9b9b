"""Call stacks of processes and exceptions, to find the line of the user's code."""

from __future__ import annotations

import os
import re
import site
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import FrameType, TracebackType

from lockstep.ground.errors import words_of
from lockstep.ground.rank import Doing, marks_in

LOCKSTEP = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# torch is not imported: a process that only watches ranks does not need it
_spec = find_spec("torch")
TORCH = os.path.dirname(os.path.abspath((_spec and _spec.origin) or "torch")) + os.sep
PACKAGES = tuple({folder + os.sep for folder in (*site.getsitepackages(), site.getusersitepackages())})
"""Folders of installed packages, including the user's site packages."""

_COMMANDS = tuple({os.path.join(folder, "bin") + os.sep for folder in (sys.prefix, site.getuserbase())})
"""Folders of installed commands. These are a few lines each that call their package."""

FOREIGN = (LOCKSTEP, TORCH, os.path.dirname(os.__file__) + os.sep, *PACKAGES, *_COMMANDS, "<frozen")
"""Folders with files that are not training scripts."""

SPAWNED = f"{LOCKSTEP}launch{os.sep}spawn.py"

_TORCH_WAITS = (
    (f"distributed{os.sep}distributed_c10d.py", ""),
    (f"distributed{os.sep}_functional_collectives.py", "wait_tensor"),
)
"""Torch's functions that wait for other ranks. The end of a file's path, and the function ("": any)."""

_LOADERS = (f"{TORCH}utils{os.sep}data{os.sep}", f"{LOCKSTEP}data{os.sep}")
_FETCH = f"{TORCH}utils{os.sep}data{os.sep}_utils{os.sep}fetch.py"


@dataclass(frozen=True)
class Frame:
    """One frame in a call stack: a file, a line and a function."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """True if the file belongs to the user, not to lockstep, torch, Python or an installed package."""
        return not self.file.startswith(FOREIGN)

    @property
    def waits(self) -> bool:
        """True if the function waits for other ranks."""
        if self.file.startswith(TORCH):
            return any(self.file.endswith(end) and name in ("", self.function) for end, name in _TORCH_WAITS)
        mark = self.mark
        return mark is not None and mark.waits

    @property
    def mark(self) -> Doing | None:
        """Declaration by the decorator `does` or `waits` of this lockstep function; None for any other function."""
        return marks_in(self.file).get(self.function) if self.file.startswith(LOCKSTEP) else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """Call stack: a tuple of frames, the innermost first, with the Trainer's hook and batch if they are known."""

    frames: tuple[Frame, ...]
    phase: str = field(default="", compare=False)  #: the hook that the rank is in, if its Trainer reported it
    batch: int = field(default=-1, compare=False)  #: the rank's training batch, if its Trainer reported it

    def location(self, called: str = "") -> str:
        """Return the innermost line of the user's code, such as ``"train.py:14"``, or else a line of other code.

        Args:
            called: the line that called from another process.
        """
        users = next((frame for frame in self.frames if frame.is_users), None)
        if users is not None or called:
            return str(users or called)
        # a project that is installed has no line outside of it: take the package that called lockstep
        calls = [at for at, frame in enumerate(self.frames) if frame.file.startswith(LOCKSTEP)]
        caller = self.frames[calls[-1] + 1].file if calls and calls[-1] + 1 < len(self.frames) else ""
        root = max((folder for folder in PACKAGES if caller.startswith(folder)), key=len, default="")
        if root and not caller.startswith(TORCH):
            name, separator, _ = caller.removeprefix(root).partition(os.sep)
            package = root + name + separator
            return str(next(frame for frame in self.frames if frame.file.startswith(package)))
        outside = (frame for frame in self.frames if not frame.file.startswith((LOCKSTEP, TORCH, "<frozen")))
        return str(next(outside, self.frames[0] if self.frames else "an unknown place"))

    @property
    def waits(self) -> bool:
        """True if the user's code has called a function of lockstep or torch that waits for other ranks."""
        return any(frame.waits for frame in self._below_users())

    @property
    def loads(self) -> bool:
        """True if the process is loading data in a data set or a data loader."""
        return not self.waits and any(frame.file.startswith(_LOADERS) for frame in self.frames)

    @property
    def fetches(self) -> bool:
        """True if a data loader is fetching samples from a data set."""
        return any(frame.file == _FETCH for frame in self.frames)

    @property
    def doing(self) -> str:
        """Activity of lockstep or torch below the user's code, in words or as a function's name; "" if unknown."""
        below = list(self._below_users())
        for frame in reversed(below):
            mark = frame.mark
            if mark is not None and mark.words:
                return mark.words
        named = [frame.function for frame in below if frame.waits and frame.function != "wrapper"]
        return named[-1] if named else ""

    def described(self, called: str = "") -> str:
        """Describe the activity and the line of the user's code. ``called`` is as for :meth:`location`."""
        return f"{self.doing or 'its own code'} ({self.location(called)})"

    def _below_users(self) -> Iterable[Frame]:
        for frame in self.frames:
            if frame.is_users:
                return
            yield frame


def _within(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames inside the function that a spawned process runs. Frames outside it are lockstep's."""
    kept: list[Frame] = []
    for frame in frames:
        if frame.file == SPAWNED and frame.function == "work":
            break
        kept.append(frame)
    return tuple(kept)


def stack_of(error: BaseException) -> Stack:
    """Return the stack at which an exception was raised. If a loader worker raised it, return the worker's stack."""
    text = words_of(error)
    if IN_WORKER in text:
        frames = tuple(reversed(_read(text.split(IN_WORKER, 1)[1])))
        if frames:
            return Stack(frames)
    return Stack(_within(_frames(error.__traceback__)))


def is_through_lockstep(error: BaseException) -> bool:
    """Return True if an exception, or one in its chain, passed through lockstep's code."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if any(frame.file.startswith(LOCKSTEP) for frame in _frames(each.__traceback__)):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


def current_stack() -> Stack:
    """Return the stack of the caller."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return Stack(_within(found))


def parse_stack(text: str) -> Stack:
    """Parse a stack from text that was written by `faulthandler` or by the thread that answers stack requests."""
    batch = _BATCH.search(text)
    frames = _within(_read(text))
    return Stack(frames) if batch is None else Stack(frames, batch[2], int(batch[1]))


IN_WORKER = "Original Traceback (most recent call last):\n"
_BATCH = re.compile(r"^  Batch (-?\d+) in (.*)$", re.MULTILINE)
_LINE = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)


def _read(text: str) -> list[Frame]:
    return [Frame(file, int(line), function) for file, line, function in _LINE.findall(text)]


def _frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    outer_first = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace)
    ]
    return tuple(reversed(outer_first))
