"""Text that a failed run prints on the terminal, with short tracebacks and without control characters."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback

from lockstep.supervise.stack import IN_WORKER, LOCKSTEP, TORCH

WHOLE = "LOCKSTEP_WHOLE_TRACEBACKS"
"""Environment variable that, if 1, makes tracebacks print in full."""

SHORT = 16
"""Maximum number of lines of a traceback that is printed unchanged."""

MOST = 17
"""Maximum number of printed lines of a traceback with several ranks. Two of them fit into 40 lines."""

MOST_ALONE = 36
"""Maximum number of printed lines of a traceback on a single process."""

WIDE = 1000
"""Maximum number of printed characters of a line."""

_FRAME = re.compile(r'^\s*File "(.+)", line \d+')
_EXCEPTIONS = re.compile(r"\blockstep\.ground\.errors\.(?=MisconfigurationException|NonFiniteError|RankFailed)")
_CARETS = re.compile(r"^\s*[\^~]+\s*$")


def shortened(error: BaseException, most: int = MOST) -> str:
    """Return an exception's traceback. Long tracebacks omit frames in lockstep, torch and the standard library.

    The innermost frame of each traceback remains in any case. From long chains and groups of exceptions, and from long
    messages, the middle is omitted. Control characters are escaped.

    Args:
        error: the exception.
        most: maximum number of lines.
    """
    text = as_imported("".join(traceback.format_exception(error)))
    if os.environ.get(WHOLE) == "1":
        return text
    lines = text.splitlines()
    if len(lines) > SHORT:
        lines = _without_inner(lines)
    if len(lines) > most:
        first = most // 3
        last = most - first - 1
        note = f"... {len(lines) - first - last} lines ({WHOLE}=1 shows them)"
        lines = [*lines[:first], note, *lines[-last:]]
    lines = [line if len(line) <= WIDE else f"{line[:WIDE]}... ({len(line)} characters)" for line in lines]
    return "".join(f"{printable(line)}\n" for line in lines)


def as_imported(text: str) -> str:
    """Replace the internal module path of lockstep's exceptions in a text by the path from which users import them."""
    return _EXCEPTIONS.sub("lockstep.utilities.exceptions.", text)


def wipe_line() -> None:
    """On a terminal, move to the start of the line, clear everything below, and show the cursor.

    Another rank may have drawn progress bars there. The rank draws them again if it still runs.
    """
    start = wiping()
    if start:
        with contextlib.suppress(OSError):  # stderr is closed
            os.write(2, start.encode())


def wiping() -> str:
    """Return the control sequence of :func:`wipe_line`, or "" if stderr is not a terminal.

    Written together with a text, it leaves no gap in which a bar could be drawn.
    """
    try:
        return "\r\x1b[J\x1b[?25h" if os.isatty(2) and os.environ.get("TERM") != "dumb" else ""
    except OSError:
        return ""


def print_line(words: str) -> None:
    """Print a line on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"lockstep: {words}.\n".encode())


_STDLIB = os.path.dirname(os.__file__) + os.sep


def _without_inner(lines: list[str]) -> list[str]:
    """Replace consecutive frames in lockstep, torch and the standard library by one line with the number of frames."""
    kept: list[str] = []
    omitted, at = 0, 0
    while at < len(lines):
        frame = _FRAME.match(lines[at])
        if frame is None:
            kept.append(lines[at])
            at += 1
            continue
        # end of the frame's source and carets, which are indented deeper than its first line
        end = at + 1
        depth = len(lines[at]) - len(lines[at].lstrip())
        while end < len(lines) and lines[end].startswith(" " * (depth + 1)) and not _FRAME.match(lines[end]):
            end += 1
        is_innermost = end == len(lines) or _FRAME.match(lines[end]) is None
        # installed packages are in the library's folder, too
        is_inner = frame[1].startswith((LOCKSTEP, TORCH, "<frozen ")) or (
            frame[1].startswith(_STDLIB) and "-packages" not in frame[1]
        )
        if is_inner and not is_innermost:
            omitted += 1
        else:
            if omitted:
                kept.append(f"{' ' * depth}... {omitted} calls in lockstep, torch and Python ({WHOLE}=1 shows them)")
            omitted = 0
            kept += [line for line in lines[at:end] if not _CARETS.match(line)]
        at = end
    return kept


_PLACES = re.compile(r'File "([^"\n]+)", line (\d+)|([^\s()"\']+):(\d+)')


def name_cells(text: str) -> str:
    """Replace the file names of a notebook's cells in a text with IPython's names for the cells.

    ``/tmp/ipykernel_5/89.py:7`` becomes ``Cell In[3], line 7``. Outside of IPython the text stays as it is.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    label = getattr(getattr(shell, "compile", None), "format_code_name", None)

    def named(found: re.Match[str]) -> str:
        cell = label and label(found[1] or found[3])
        return f"{' '.join(cell)}, line {found[2] or found[4]}" if cell else found[0]

    return text if label is None else _PLACES.sub(named, text)


REASON = 400
"""Maximum length of a reason in the last line."""


def one_line(text: str, most: int | None = REASON) -> str:
    r"""Return the text on one line, with nonprintable characters escaped. From a long text, the middle is omitted.

    Args:
        text: the text.
        most: maximum number of characters; None: no limit.

    Example:
        >>> one_line("no\nlockstep: rank 1 failed\x1b[2K")
        'no\\nlockstep: rank 1 failed\\x1b[2K'
    """
    length = len(text)
    if most is not None and length > 2 * most:  # limits the work
        text = text[:most] + text[-most:]
    text = "".join(each if each.isprintable() else _escaped(each) for each in text)
    if most is None or (length <= most and len(text) <= most):
        return text
    end = most // 3  # messages end with the solution
    return f"{text[: most - end]} ... ({length} characters) ... {text[-end:]}"


def printable(text: str) -> str:
    """Return the text with nonprintable characters escaped, except newlines and tabs."""
    if text.isascii() and not _CONTROL.search(text):
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def reason_of(error: BaseException) -> str:
    """Return an exception's type and message on one line, escaped and shortened: ``"ValueError: message"``."""
    if isinstance(error, SystemExit):
        return one_line(f"sys.exit({'' if error.code is None else repr(error.code)}) in the middle of the run")
    parts = traceback.format_exception_only(type(error), error)
    if isinstance(error, SyntaxError):  # file and line precede it
        parts = [next((part for part in parts if part.startswith(type(error).__name__)), parts[-1])]
    text = as_imported("".join(parts).strip())
    if IN_WORKER in text:  # the last line of the worker's traceback contains it
        return one_line(text.rsplit("\n", 1)[-1].strip()) + " (in a loader worker)"
    return one_line(text)
