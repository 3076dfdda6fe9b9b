"""What can be wrong in the benchmark of starts without anybody noticing: reading, statistics, texts, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine.pairs import Interval
from benchmarks.start import (
    BY_HAND,
    BY_TRAINER,
    COMMON,
    HAND,
    WAYS,
    Start,
    members,
    page,
    proportional_set_size,
    steps_in,
    table,
    verdict,
)


def test_steps_are_found_among_other_lines() -> None:
    assert steps_in("warning\nstepped 1 20.5\nstepped 0 20.25\nthe end") == {1: 20.5, 0: 20.25}
    assert steps_in("nothing") == {}


def test_the_table_has_medians_smallest_and_the_median_of_ratios() -> None:
    hand = [Start(2.0, 3.0, 5.0), Start(4.0, 5.0, 6.0), Start(3.0, 4.0, 7.0)]
    ours = [Start(2.2, 3.0, 4.0), Start(4.4, 5.0, 4.5), Start(3.0, 4.0, 5.0)]
    starts = {way: hand if way == HAND else ours for way in WAYS}
    rows = table(starts, dict.fromkeys(WAYS, 512.4)).splitlines()
    assert len(rows) == 2 + len(WAYS)
    assert rows[2] == f"| {HAND} | 3.00 | 2.00 |  |  | 4.00 | 6.00 | 5.00 | 512 |"
    assert rows[3].startswith('| lockstep, "ddp" | 3.00 | 2.20 | 1.10 (1.00 to 1.10) | ≤ 1.2 | 4.00 | 4.50 | 4.00 |')
    assert rows[4].split(" | ")[4] == ""  # nothing is promised of the others
    assert "load average 0.5 before, 0.7 after" in page("\n".join(rows), 3, (0.5, 0.7))


def test_the_verdict_goes_by_the_interval() -> None:
    assert "keeps" in verdict(Interval(1.0, 0.9, 1.2))
    assert "breaks" in verdict(Interval(1.3, 1.21, 1.4))
    assert "more rounds" in verdict(Interval(1.0, 0.9, 1.3))


def test_a_session_and_what_descends_from_it_in_other_sessions() -> None:
    child = "import subprocess, sys; sys.stdin.read()"
    leader = (
        f"import subprocess, sys; other = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        "print(other.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", leader], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        assert members(process.pid) == sorted([process.pid, other])
        until = time.monotonic() + 20
        while proportional_set_size(other) <= 0.5 and time.monotonic() < until:  # it has just begun
            time.sleep(0.01)
        assert proportional_set_size(other) > 0.5
    until = time.monotonic() + 20
    while proportional_set_size(other) and time.monotonic() < until:  # nobody waits for it but the system
        time.sleep(0.01)
    assert proportional_set_size(other) == 0.0
    assert proportional_set_size(os.getpid()) > 50


def test_the_scripts_are_python(tmp_path: Path) -> None:
    for script in (COMMON + BY_HAND, COMMON + BY_TRAINER):
        compile(script, "script.py", "exec")
