"""What stands on a screen: lines of a terminal, with what progress bars have overwritten left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class Piece:
    """What came at once from a run."""

    at: float  #: when, on the clock of ``time.monotonic``
    text: str


def shown(text: str) -> list[str]:
    """The lines that are not empty, as they stand at last; a carriage return begins its line anew."""
    lines = []
    for line in _CODE.sub("", text).replace("\r\n", "\n").split("\n"):
        last = ""
        for again in line.split("\r"):
            last = again + last[len(again) :]
        if last.strip():
            lines.append(last.rstrip())
    return lines


def text_of(pieces: Iterable[Piece]) -> str:
    """All that was printed."""
    return "".join(piece.text for piece in pieces)


def since(pieces: Sequence[Piece], moment: float) -> list[str]:
    """The lines that are printed from a moment on.

    What shares its line with something older counts: a bar that is drawn once more is one line.
    """
    return shown(text_of(piece for piece in pieces if piece.at >= moment))
