"""A stack read: where in the user's code a rank is, and what lockstep does for it there."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType, TracebackType

LOCKSTEP = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_spec = find_spec("torch")  # not imported: a process that only watches ranks has no use for it
TORCH = os.path.dirname(os.path.abspath((_spec and _spec.origin) or "torch")) + os.sep
_PATHS = sysconfig.get_paths()
FOREIGN = (
    LOCKSTEP,
    TORCH,
    *{_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen",
)
"""Where files lie that are nobody's training script."""

REASON = 300
"""Characters of a reason that are told in the last line."""

SPAWNED = f"{LOCKSTEP}launch{os.sep}spawn.py"

WAITING = (
    (f"distributed{os.sep}distributed_c10d.py", ""),
    (f"distributed{os.sep}_functional_collectives.py", "wait_tensor"),
    (f"launch{os.sep}noting.py", "waited"),
    (f"launch{os.sep}gate.py", "_wait"),
    (f"parallel{os.sep}reducer.py", "finish"),
    (f"parallel{os.sep}shared.py", "wait"),
    (f"ground{os.sep}agreement.py", "settle"),
    (f"ground{os.sep}agreement.py", "close"),
    (f"ground{os.sep}comm.py", ""),
)
"""Ends of files, and functions in them ("": any), that wait for other ranks."""

_LOADERS = (f"{TORCH}utils{os.sep}data{os.sep}", f"{LOCKSTEP}data{os.sep}")
_FETCH = f"{TORCH}utils{os.sep}data{os.sep}_utils{os.sep}fetch.py"
DOINGS = {
    ("loop/state.py", "save"): "saving a checkpoint",
    ("loop/state.py", "read"): "reading a checkpoint",
    ("strategies/collectives.py", "barrier"): "strategy.barrier",
    ("strategies/collectives.py", "broadcast"): "strategy.broadcast",
    ("strategies/collectives.py", "reduce"): "strategy.reduce",
    ("strategies/collectives.py", "all_gather"): "all_gather",
    ("strategies/ddp.py", "_make_group"): "joining the other ranks",
    ("strategies/ddp.py", "setup_module"): "taking rank 0's weights",
    ("parallel/reducer.py", "finish"): "reducing gradients in backward",
    ("parallel/reducer.py", "_conclude"): "reducing gradients in backward",
    ("parallel/start.py", "sync_buffers"): "taking rank 0's buffers",
    ("loop/results.py", "reduce_epoch"): "reducing logged values",
    ("loop/results.py", "reduce_step"): "reducing logged values",
    ("loop/data.py", "_agree"): "asking who has more data",
    ("loop/feeding.py", "check_alike"): "comparing the loaders of the ranks",
    ("loop/fit.py", "_agree_on_stopping"): "asking who wants to stop",
    ("loop/fit.py", "_share_ending"): "ending the fit",
    ("loop/session.py", "_set_up"): "setting up",
    ("launch/gate.py", "_wait"): "comparing what the ranks are about to do",
}
"""What a rank does that is in such a function (of a file of lockstep's), for people."""


@dataclass(frozen=True)
class Frame:
    """One function that has been called and has not returned."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether this is neither lockstep's, torch's, Python's own nor an installed package's."""
        return not self.file.startswith(FOREIGN)

    @property
    def waits(self) -> bool:
        """Whether this is a place that waits for other ranks."""
        return self.file.startswith((LOCKSTEP, TORCH)) and any(
            self.file.endswith(end) and function in ("", self.function) for end, function in WAITING
        )

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """Frames, the innermost first."""

    frames: tuple[Frame, ...]

    def place(self, called: str = "") -> str:
        """The innermost line of the user's code, ``"train.py:14"``; where there is none, of any code.

        Args:
            called: the line that called from another process.
        """
        users = next((frame for frame in self.frames if frame.is_users), None)
        if users is not None or called:
            return str(users or called)
        outside = (frame for frame in self.frames if not frame.file.startswith((LOCKSTEP, TORCH, "<frozen")))
        return str(next(outside, self.frames[0] if self.frames else "an unknown place"))

    @property
    def waits(self) -> bool:
        """Whether it stands in a collective: lockstep or torch waits for other ranks, below the user's code."""
        return any(frame.waits for frame in self._below_users())

    @property
    def loads(self) -> bool:
        """Whether it fetches data: a data set's or a loader's code is under way."""
        return not self.waits and any(frame.file.startswith(_LOADERS) for frame in self.frames)

    @property
    def fetches(self) -> bool:
        """Whether it is in a data set, for a loader."""
        return any(frame.file == _FETCH for frame in self.frames)

    @property
    def doing(self) -> str:
        """What it does below the user's code, in words or by the name of a function; "" if nothing."""
        below = list(self._below_users())
        for frame in reversed(below):
            if frame.file.startswith(LOCKSTEP):
                name = frame.file.removeprefix(LOCKSTEP).replace(os.sep, "/")
                if (name, frame.function) in DOINGS:
                    return DOINGS[name, frame.function]
        named = [frame.function for frame in below if frame.waits and frame.function != "wrapper"]
        return named[-1] if named else ""

    def described(self, called: str = "") -> str:
        """What it does, and where; ``called`` as for :meth:`place`."""
        return f"{self.doing or 'its own code'} ({self.place(called)})"

    def _below_users(self) -> Iterable[Frame]:
        for frame in self.frames:
            if frame.is_users:
                return
            yield frame


def _within(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Frames up to where a spawned process was let into its call; what lies outside is no line of anybody's."""
    kept: list[Frame] = []
    for frame in frames:
        if frame.file == SPAWNED and frame.function == "work":
            break
        kept.append(frame)
    return tuple(kept)


def stack_of(error: BaseException) -> Stack:
    """Where an exception came from; if a loader worker raised it, where in the worker."""
    text = str(error) if error.args and isinstance(error.args[0], str) else ""
    if _IN_WORKER in text:
        frames = tuple(reversed(_read(text.split(_IN_WORKER, 1)[1])))
        if frames:
            return Stack(frames)
    return Stack(_within(_frames(error.__traceback__)))


def reason_of(error: BaseException) -> str:
    """An exception in one line, escaped and cut: ``"ValueError: what it said"``."""
    if isinstance(error, SystemExit):
        return one_line(f"sys.exit({'' if error.code is None else repr(error.code)}) in the middle of the run")
    parts = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):  # file and line stand before it
        parts = [next((part for part in parts if part.startswith(type(error).__name__)), parts[-1])]
    text = "".join(parts).strip()
    if _IN_WORKER in text:  # the last line of the worker's traceback has it
        return one_line(text.rsplit("\n", 1)[-1].strip()) + " (in a loader worker)"
    return one_line(text)


def one_line(text: str, most: int | None = REASON) -> str:
    r"""A text in one line that a terminal shows as it is: what does not print is escaped, what is too long is cut.

    Args:
        text: whatever somebody has said.
        most: characters; None: all.

    Example:
        >>> one_line("no\nlockstep: rank 1 failed\x1b[2K")
        'no\\nlockstep: rank 1 failed\\x1b[2K'
    """
    length = len(text)
    if most is not None and length > most:
        text = text[:most]
    text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if most is None or (length <= most and len(text) <= most):
        return text
    return f"{text[:most]}... ({length} characters)"


def printable(text: str) -> str:
    """Lines that a terminal shows as they are: of what does not print, ends of lines and tabs stay."""
    if text.isascii() and not _CONTROL.search(text):
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def calling() -> Stack:
    """The stack of the caller."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return Stack(_within(found))


def dumped(text: str) -> Stack:
    """The stack in what `faulthandler` wrote."""
    return Stack(_within(_read(text)))


_IN_WORKER = "Original Traceback (most recent call last):\n"
_LINE = re.compile(r'^\s*File "(.+)", line (\d+),? in (.+)$', re.MULTILINE)


def _read(text: str) -> list[Frame]:
    return [Frame(file, int(line), function) for file, line, function in _LINE.findall(text)]


def _frames(trace: TracebackType | None) -> tuple[Frame, ...]:
    outer_first = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace)
    ]
    return tuple(reversed(outer_first))
