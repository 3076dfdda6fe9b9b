"""The example on a stream: each line once, on any number of ranks, and across a resume on another number."""

from __future__ import annotations

from pathlib import Path

from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "stream.py"
LINES = "--lines=3001"


def test_each_line_comes_once_and_another_number_of_ranks_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    def said(folder: str, devices: int, *flags: str) -> list[str]:
        flags = (LINES, f"--devices={devices}", f"--out={tmp_path / folder}", *flags)
        done = run_script(ranks, SCRIPT, *flags, folder=tmp_path, world=devices, launched=devices > 1, timeout=100)
        assert [each.returncode for each in done] == [0] * devices, done[0].stderr
        return done[0].stdout.splitlines()

    one = said("one", 1)
    assert one[0].startswith("lines 3001, sum of their keys ")
    assert one[1].startswith("accuracy 0.")
    assert said("two", 2) == one
    assert said("stopped", 2, "--stop-after=20")[0].startswith("lines 2560, ")
    assert said("stopped", 1, "--resume") == one
