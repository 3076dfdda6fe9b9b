"""Stacks: where in the user's code a rank is, this one or another, and tracebacks that end on the user's lines."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import site
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import IO, Any, TypeAlias

from lockstep.ground.installed import STACK
from lockstep.ground.rank import Doing, marks_in

# -- tracebacks ----------------------------------------------------------------------------------------------


WHOLE = "LOCKSTEP_WHOLE_TRACEBACKS"
"""The variable that, at 1, has all lines printed."""

SHORT = 16
"""Lines up to which a traceback is shown as it is."""

MOST = 17
"""Lines of a traceback that are shown, the first and the last, where ranks fail: two of them stay below 40 lines."""

MOST_ALONE = 36
"""The same on one process, which prints one traceback and nothing else."""

WIDE = 1000
"""Characters of a line that are shown."""

_FRAME = re.compile(r'^\s*File "(.+)", line \d+')
_CARETS = re.compile(r"^\s*[\^~]+\s*$")


def shortened(error: BaseException, most: int = MOST) -> str:
    """The traceback of an exception, as Python prints it, without the frames of lockstep and torch if it is long.

    The innermost frame of each traceback stays, whosever it is. Chains and groups of many exceptions and messages of
    many lines lose their middle, and characters that a terminal would obey are escaped.

    Args:
        error: the exception.
        most: lines that are shown.
    """
    text = "".join(traceback.format_exception(error))
    if os.environ.get(WHOLE) == "1":
        return text
    lines = text.splitlines()
    if len(lines) > SHORT:
        lines = list(_without_inner(lines))
    if len(lines) > most:
        first = most // 3
        last = most - first - 1
        note = f"... {len(lines) - first - last} lines ({WHOLE}=1 shows them)"
        lines = [*lines[:first], note, *lines[-last:]]
    return "".join(f"{printable(_narrow(line))}\n" for line in lines)


def wipe_line() -> None:
    """On a terminal, begin at the left, and show the cursor: another rank may have its bars on this line and below.

    It draws them again, if it is still there.
    """
    begin = wiping()
    if begin:
        with contextlib.suppress(OSError):  # it is closed
            os.write(2, begin.encode())


def wiping() -> str:
    """What :func:`wipe_line` writes; in one write with a text, no bar comes between. "" where stderr is no terminal."""
    try:
        return "\r\x1b[J\x1b[?25h" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""
    except OSError:
        return ""


def say(words: str) -> None:
    """Write a line on the screen."""
    with contextlib.suppress(OSError):
        os.write(2, f"lockstep: {words}.\n".encode())


def _narrow(line: str) -> str:
    return line if len(line) <= WIDE else f"{line[:WIDE]}... ({len(line)} characters)"


def _without_inner(lines: list[str]) -> Iterator[str]:
    left_out, at = 0, 0
    while at < len(lines):
        frame = _FRAME.match(lines[at])
        if frame is None:
            yield lines[at]
            at += 1
            continue
        end = at + 1  # of the frame's source and carets, which stand deeper than its first line
        depth = len(lines[at]) - len(lines[at].lstrip())
        while end < len(lines) and lines[end].startswith(" " * (depth + 1)) and not _FRAME.match(lines[end]):
            end += 1
        goes_on = end < len(lines) and _FRAME.match(lines[end]) is not None
        if goes_on and frame[1].startswith((LOCKSTEP, TORCH)):
            left_out += 1
        else:
            if left_out:
                yield f"{' ' * depth}... {left_out} calls in lockstep and torch ({WHOLE}=1 shows them)"
            left_out = 0
            yield from (line for line in lines[at:end] if not _CARETS.match(line))
        at = end


# -- this process --------------------------------------------------------------------------------------------


LOCKSTEP = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_spec = find_spec("torch")  # not imported: a process that only watches ranks has no use for it
TORCH = os.path.dirname(os.path.abspath((_spec and _spec.origin) or "torch")) + os.sep
FOREIGN = (
    LOCKSTEP,
    TORCH,
    *{folder + os.sep for folder in (os.path.dirname(os.__file__), *site.getsitepackages())},
    "<frozen",
)
"""Where files lie that are nobody's training script."""

REASON = 400
"""Characters of a reason that are told in the last line."""

SPAWNED = f"{LOCKSTEP}launch{os.sep}spawn.py"

_TORCH_WAITS = (
    (f"distributed{os.sep}distributed_c10d.py", ""),
    (f"distributed{os.sep}_functional_collectives.py", "wait_tensor"),
)
"""Ends of torch's files, and functions in them ("": any), that wait for other ranks."""

_LOADERS = (f"{TORCH}utils{os.sep}data{os.sep}", f"{LOCKSTEP}data{os.sep}")
_FETCH = f"{TORCH}utils{os.sep}data{os.sep}_utils{os.sep}fetch.py"


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
        if self.file.startswith(TORCH):
            return any(self.file.endswith(end) and name in ("", self.function) for end, name in _TORCH_WAITS)
        mark = self.mark
        return mark is not None and mark.waits

    @property
    def mark(self) -> Doing | None:
        """What a function of lockstep's is marked by."""
        return marks_in(self.file).get(self.function) if self.file.startswith(LOCKSTEP) else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Stack:
    """Frames, the innermost first."""

    frames: tuple[Frame, ...]

    def location(self, called: str = "") -> str:
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
            mark = frame.mark
            if mark is not None and mark.words:
                return mark.words
        named = [frame.function for frame in below if frame.waits and frame.function != "wrapper"]
        return named[-1] if named else ""

    def described(self, called: str = "") -> str:
        """What it does, and where; ``called`` as for :meth:`location`."""
        return f"{self.doing or 'its own code'} ({self.location(called)})"

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


def is_through_lockstep(error: BaseException) -> bool:
    """Whether an exception came out of a call of lockstep's, or is chained to one that did."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if any(frame.file.startswith(LOCKSTEP) for frame in _frames(each.__traceback__)):
            return True
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return False


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
    if most is not None and length > 2 * most:  # no more is looked at
        text = text[:most] + text[-most:]
    text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if most is None or (length <= most and len(text) <= most):
        return text
    end = most // 3  # messages end with the way out
    return f"{text[: most - end]} ... ({length} characters) ... {text[-end:]}"


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


# -- another rank --------------------------------------------------------------------------------------------


SECONDS = 1.0
"""How long an answer may take."""

ASK: int | None = int(signal.SIGRTMIN) + 9 if sys.platform.startswith("linux") else None
"""The signal that asks; `faulthandler` answers it at once, also while the rank waits in a collective."""

HEADER = "Stack (most recent call first):\n"
"""Before each answer, by `faulthandler` too."""

PROMPT = 0.5
"""Seconds in which the thread answers, unless it cannot."""

Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

_file: IO[bytes] | None = None
_say: Callable[[], None] | None = None
_bell: tuple[int, int] = (0, -1)
"""The process in which a thread answers, and the descriptor of the pipe's end into which others write."""


def offer() -> str:
    """Let other processes ask for the stack of this one's main thread.

    Returns:
        where the answers will lie, and where to ask: what :func:`ask` wants to know. "" where a system cannot do that.
    """
    global _file, _bell
    if ASK is None:
        return ""
    if _file is None:
        _file = tempfile.TemporaryFile(prefix="lockstep-")  # noqa: SIM115, open as long as this process lives
        STACK.install(_register)
    if _bell[0] != os.getpid():  # a forked process has the descriptors, and not the thread
        ear, mouth = os.pipe()
        _bell = os.getpid(), mouth
        threading.Thread(target=_attend, args=(ear, _file), name="lockstep-sample", daemon=True).start()
    locations = (_file.fileno(), _bell[1])
    path = f"/proc/{os.getpid()}/fd"
    return (
        f"{path}/{locations[0]}:{os.fstat(locations[0]).st_ino}:{path}/{locations[1]}:{os.fstat(locations[1]).st_ino}"
    )


def _register() -> Callable[[], object]:
    assert ASK is not None
    assert _file is not None
    # At the end of a process faulthandler puts back what was there before: who is asked then shall not die of it.
    before = _change_handler(ASK, signal.SIG_IGN)
    faulthandler.register(ASK, file=_file, all_threads=False, chain=False)
    return partial(_unregister, ASK, before)


def _unregister(number: int, before: Handler) -> None:
    faulthandler.unregister(number)
    if before is not None:
        _change_handler(number, before)


def _change_handler(number: int, handler: Handler) -> Handler:
    """The handler that was there; only a main thread can change it."""
    with suppress(ValueError):
        return signal.signal(number, handler)
    return None


def _attend(ear: int, file: IO[bytes]) -> None:
    """In a thread: write down where the main thread is, whenever somebody asks."""
    main = threading.main_thread().ident
    while asked := os.read(ear, 4096):
        if b"!" in asked and _say is not None:
            _say()
        if b"?" not in asked:
            continue
        frame = None if main is None else sys._current_frames().get(main)
        lines = [HEADER]
        while frame is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
        del frame  # which would keep what it refers to
        with suppress(OSError):
            os.write(file.fileno(), "".join(lines).encode(errors="replace"))


def answer_by(say: Callable[[], None] | None) -> None:
    """Let ``say`` be called, in the thread that answers, when another process wants this one to `speak`; None: let
    nothing happen then."""
    global _say
    _say = say


def speak(answers: str) -> None:
    """Have a process that made an :func:`offer` call what it gave to `answer_by`, if it can."""
    _ring(b"!", *answers.split(":")[2:])


def is_there(answers: str) -> bool:
    """Whether the process that made an :func:`offer` still runs; its id may be somebody else's by now."""
    return bool(answers) and _is_file(*answers.split(":")[:2])


def _is_file(path: str, inode: str = "") -> bool:
    try:
        return str(os.stat(path).st_ino) == inode
    except OSError:
        return False


def ask(process: int, answers: str, by_signal: bool = False) -> Stack | None:
    """The stack of a process that made an :func:`offer`; None if it does not answer.

    Args:
        process: its id.
        answers: what its offer returned.
        by_signal: whether no thread can answer there: it was forked from the process that made the offer.
    """
    if ASK is None or not is_there(answers):
        return None
    try:
        with _answering(answers) as answer:
            if not by_signal and _ring(b"?", *answers.split(":")[2:]):
                found = answer(PROMPT)
                if found is not None:
                    return found
            os.kill(process, ASK)
            return answer()
    except OSError:  # it has ended
        return None


def ask_workers(process: int, answers: str) -> list[Stack]:
    """The stacks of a process' children that it has forked after its :func:`offer`: workers of a loader."""
    found = []
    for child in _children(process):
        if ASK is not None and _handles(child, ASK):
            stack = ask(child, answers, by_signal=True)
            if stack is not None:
                found.append(stack)
    return found


def ask_stopped(process: int, answers: str) -> Stack | None:
    """The stack of a process that somebody has stopped. It goes on then, after it has answered."""
    if ASK is None or not is_there(answers):
        return None
    import ctypes

    library = ctypes.CDLL(None)
    try:
        with _answering(answers) as answer:
            # to its main thread: a signal to the whole process that is stopped may get lost
            if not hasattr(library, "tgkill") or library.tgkill(process, process, ASK):
                os.kill(process, ASK)
            os.kill(process, signal.SIGCONT)
            return answer()
    except OSError:
        return None


def _ring(word: bytes, path: str = "", inode: str = "") -> bool:
    """Wake the thread that answers; whether there may be one."""
    if not _is_file(path, inode):
        return False
    try:
        bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.write(bell, word) == 1
    except OSError:  # nobody has taken in what came before
        return False
    finally:
        os.close(bell)


@contextmanager
def _answering(answers: str) -> Iterator[Callable[..., Stack | None]]:
    """Inside, the function that is given reads what a process writes that is asked after this began."""
    with open(answers.partition(":")[0], "rb") as file:
        file.seek(0, os.SEEK_END)
        yield lambda seconds=SECONDS: _answer(file, seconds)


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _handles(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal: this one would end a process that has none."""
    with suppress(OSError, StopIteration), open(f"/proc/{process}/status") as file:
        caught = next(line.split()[1] for line in file if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _answer(file: IO[bytes], seconds: float) -> Stack | None:
    text, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
        more = file.read()
        if text and not more:
            answers = text.decode(errors="replace").split(HEADER)  # a signal lets the thread answer, too
            return dumped(next((each for each in answers if each.strip()), ""))
        text += more
    return None
