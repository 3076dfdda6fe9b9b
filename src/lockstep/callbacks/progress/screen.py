"""What is printed while bars are on the screen: it goes above them, whoever prints it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


class Screen:
    """Keeps bars of tqdm and printed text apart.

    While it is open, ``sys.stdout`` and ``sys.stderr``, where they are terminals, take whole lines, clear the
    bars, write the lines, and draw the bars again below: ``print``, warnings and lockstep's own messages.

    Args:
        bars: gives the bars that are on the screen now.
    """

    def __init__(self, bars: Callable[[], list[Any]]) -> None:
        self._bars = bars
        self._streams: dict[str, _Above] = {}

    def open(self) -> None:
        """Stand in for the streams; does nothing if it does so already, or where stdout is no terminal."""
        if self._streams or not _is_terminal(sys.stdout):
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _is_terminal(stream):
                self._streams[name] = _Above(stream, self)
                setattr(sys, name, self._streams[name])

    def close(self) -> None:
        """Give the streams back."""
        for name, stand_in in self._streams.items():
            stand_in.end()
            if getattr(sys, name) is stand_in:  # else somebody has put another one over it, and it passes text on
                setattr(sys, name, stand_in.stream)
        self._streams = {}

    def write(self, text: str, stream: Any) -> None:
        """Write text above the bars.

        Args:
            text: whole lines.
            stream: where to; a stand-in stands for the stream behind it.
        """
        stream = behind(stream)
        bars = self._bars() if _is_terminal(stream) or stream is behind(sys.stdout) else []
        for bar in bars:
            bar.clear()
            bar.fp.flush()
        stream.write(text)
        stream.flush()
        for bar in bars:
            bar.refresh()


class _Above:
    """Stands in for a stream while bars are on the screen."""

    def __init__(self, stream: Any, screen: Screen) -> None:
        self.stream = stream
        self._screen: Screen | None = screen
        self._process = os.getpid()
        self._line = ""

    def write(self, text: str) -> int:
        """Take text; what makes whole lines is shown."""
        if self._screen is None or os.getpid() != self._process:  # a loader's worker has no bars
            return int(self.stream.write(text))
        # What moves the cursor draws a bar of its own. So may a newline alone, which takes it a line down.
        if "\r" in text or "\x1b[A" in text or (text == "\n" and not self._line):
            self.stream.write(text)
            return len(text)
        lines, newline, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if newline:
            self._screen.write(lines + newline, self.stream)
        return len(text)

    def end(self) -> None:
        """From now on text is passed on as it comes."""
        self._screen = None
        if self._line:
            self.stream.write(self._line)
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def behind(stream: Any) -> Any:
    """The stream that a stand-in stands for; any other stream as it is."""
    return stream.stream if isinstance(stream, _Above) else stream


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not stream.closed and bool(stream.isatty())
