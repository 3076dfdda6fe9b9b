"""Commands of SLURM's that note how they were called and answer from a folder; no job ever runs."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

_PROGRAM = """\
#!{python} -SE
import json, os, sys
folder = {folder!r}
name = os.path.basename(sys.argv[0])
with open(os.path.join(folder, "calls"), "a") as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
calls = [json.loads(line) for line in open(os.path.join(folder, "calls"))]
number = sum(call[0] == name for call in calls)
refusal = os.path.join(folder, name + ".refuses")
if os.path.exists(refusal):
    after, words = open(refusal).read().split(" ", 1)
    if number > int(after):
        sys.exit(words)
if name == "sbatch":
    print(100 + number)
else:
    answer = os.path.join(folder, name + ".says")
    print(open(answer).read() if os.path.exists(answer) else "", end="")
"""


class FakeSlurm:
    """A folder of commands, first on PATH while the test runs.

    Args:
        folder: for the commands and what they note.
        monkeypatch: puts it on PATH.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("sbatch", "squeue", "scancel", "sacct", "scontrol"):
            program = folder / "bin" / name
            program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def calls(self, name: str) -> list[list[str]]:
        """The words behind each call of a command."""
        path = self.folder / "calls"
        made = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call[1:] for call in made if call[0] == name]

    def says(self, name: str, text: str) -> None:
        """What a command prints from here on."""
        (self.folder / f"{name}.says").write_text(text)

    def refuses(self, name: str, words: str, after: int = 0) -> None:
        """Have a command fail with these words, after it has been called so often."""
        (self.folder / f"{name}.refuses").write_text(f"{after} {words}")

    def accepts(self, name: str) -> None:
        """Undo :meth:`refuses`."""
        (self.folder / f"{name}.refuses").unlink()
