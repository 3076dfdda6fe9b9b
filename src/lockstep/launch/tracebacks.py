"""Tracebacks that end on the user's lines: what lockstep and torch call in between is counted, not shown."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from lockstep.launch.stack import LOCKSTEP, TORCH, printable

WHOLE = "LOCKSTEP_WHOLE_TRACEBACKS"
"""The variable that, at 1, has all lines printed."""

SHORT = 16
"""Lines up to which a traceback is shown as it is."""

MOST = 18
"""Lines of a traceback that are shown: the first and the last. Two ranks that fail alike stay below 40."""

WIDE = 1000
"""Characters of a line that are shown."""

_FRAME = re.compile(r'^\s*File "(.+)", line \d+')
_CARETS = re.compile(r"^\s*[\^~]+\s*$")


def shortened(error: BaseException) -> str:
    """The traceback of an exception, as Python prints it, without the frames of lockstep and torch if it is long.

    The innermost frame of each traceback stays, whosever it is. Chains and groups of many exceptions and messages of
    many lines lose their middle, and characters that a terminal would obey are escaped.
    """
    text = "".join(traceback.format_exception(error))
    if os.environ.get(WHOLE) == "1":
        return text
    lines = text.splitlines()
    if len(lines) > SHORT:
        lines = list(_without_inner(lines))
    if len(lines) > MOST:
        first = MOST // 3
        last = MOST - first - 1
        note = f"... {len(lines) - first - last} lines ({WHOLE}=1 shows them)"
        lines = [*lines[:first], note, *lines[-last:]]
    return "".join(f"{printable(_narrow(line))}\n" for line in lines)


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
