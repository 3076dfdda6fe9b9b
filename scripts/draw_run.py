"""Draws docs/first-run.svg: what the README's first script prints on a terminal, and what where a rank fails.

    python scripts/draw_run.py

Both runs are real ones, with the torch and lockstep that are installed, in a terminal of 96 columns and a fresh folder,
whose path is shortened to a dot. The second one raises on rank 1 when 20 steps are done, and leaves the model's
summary out.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PICTURE = PROJECT / "docs" / "first-run.svg"
COLUMNS = 96
STEP = "        x, y = batch\n        return"
FAILS = """        x, y = batch
        if self.global_rank == 1 and self.global_step == 20:
            raise KeyError("no such label")
        return"""

# -- a terminal ------------------------------------------------------------------------------------------------

Style = tuple[str, ...]  # what SGR codes have switched on
Cell = tuple[str, Style]
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n\b])")


class Screen:
    """The lines that a terminal of some columns shows, of which none scrolls away."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._row = self._column = 0
        self._style: Style = ()
        self.lines: list[list[Cell]] = [[]]

    def feed(self, text: str) -> None:
        """Show ``text``, with its control sequences: colours, line ends, cursor up, erase."""
        at = 0
        for found in SEQUENCE.finditer(text):
            self._write(text[at : found.start()])
            at = found.end()
            numbers, letter, control = found.groups()
            if control is not None:
                self._control(control)
            elif letter == "m":
                self._style = self._styled(numbers)
            elif letter == "A":
                self._row = max(0, self._row - int(numbers or 1))
            elif letter == "J":
                del self.lines[self._row][self._column :], self.lines[self._row + 1 :]
            elif letter == "K":
                del self.lines[self._row][0 if numbers == "2" else self._column :]
        self._write(text[at:])

    def _control(self, which: str) -> None:
        if which == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append([])
        self._column = max(0, self._column - 1) if which == "\b" else 0

    def _styled(self, numbers: str) -> Style:
        codes = (numbers or "0").split(";")
        if codes[0] == "38":
            return (*self._style, ";".join(codes))
        return () if codes == ["0"] else (*self._style, *(code for code in codes if code != "0"))

    def _write(self, text: str) -> None:
        for letter in text:
            if self._column == self._columns:
                self._control("\n")
            line = self.lines[self._row]
            line += [(" ", ())] * (self._column + 1 - len(line))
            line[self._column] = (letter, self._style)
            self._column += 1


def printed(command: list[str], folder: Path) -> list[list[Cell]]:
    """The lines on the screen when ``command`` has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        text = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    screen = Screen(COLUMNS)
    screen.feed(text.replace(os.path.realpath(folder), ".").replace(str(folder), "."))
    return [line for line in screen.lines if line]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # everybody has closed the other end
        return b""


# -- the picture -----------------------------------------------------------------------------------------------

GLYPH, LINE, MARGIN, HEAD = 7.83, 18, 18, 40
COLORS = {"31": "#ff7b72", "32": "#7ee787", "33": "#f2cc60", "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea"}
PLAIN, FAINT = "#e6edf3", "#8b949e"
FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"


def look(style: Style) -> str:
    """The attributes of a text."""
    color = FAINT if "2" in style else next((COLORS[code] for code in reversed(style) if code in COLORS), PLAIN)
    if any(code.startswith("38;5;") for code in style):
        color = "#484f58"  # the bar's part that is still to come
    weight = ' font-weight="700"' if "1" in style else ""
    return f'fill="{color}"{weight}' + (' font-style="italic"' if "3" in style else "")


def texts(lines: list[list[Cell]]) -> Iterator[str]:
    for row, line in enumerate(lines):
        column = 0
        for style, cells in groupby(line, key=lambda cell: cell[1]):
            text = "".join(letter for letter, _ in cells)
            if text.strip():
                x, y, wide = MARGIN + column * GLYPH, HEAD + row * LINE + 14, len(text) * GLYPH
                yield (
                    f'<text x="{x:.1f}" y="{y}" textLength="{wide:.1f}" lengthAdjust="spacingAndGlyphs" '
                    f'xml:space="preserve" {look(style)}>{escape(text)}</text>'
                )
            column += len(text)


def drawn(lines: list[list[Cell]]) -> str:
    """A window of a terminal with these lines, as SVG."""
    width, height = round(2 * MARGIN + COLUMNS * GLYPH), HEAD + len(lines) * LINE + MARGIN
    dots = zip((20, 40, 60), ("#ff5f57", "#febc2e", "#28c840"), strict=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="{FONT}" font-size="13">',
            "<!-- drawn by scripts/draw_run.py -->",
            f'<rect width="{width}" height="{height}" rx="9" fill="#0d1117"/>',
            *(f'<circle cx="{x}" cy="18" r="6" fill="{color}"/>' for x, color in dots),
            *texts(lines),
            "</svg>",
            "",
        ]
    )


def typed(command: str) -> list[Cell]:
    """A line as a user types it."""
    return [("$", ("32", "1")), (" ", ()), *((letter, ("1",)) for letter in command)]


def main() -> None:
    """Run, and write the picture."""
    script = (PROJECT / "first.py").read_text()
    assert STEP in script
    failing = script.replace(STEP, FAILS, 1).replace("max_epochs=20", "max_epochs=20, enable_model_summary=False")
    with tempfile.TemporaryDirectory() as folder:
        lines = []
        for name, text in (("first.py", script), ("fails.py", failing)):
            (Path(folder) / name).write_text(text)
            lines += [typed(f"python {name}"), *printed([sys.executable, name], Path(folder)), []]
    PICTURE.write_text(drawn(lines[:-1]))


if __name__ == "__main__":
    main()
