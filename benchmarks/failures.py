"""What happens when a rank fails, or when ranks wait for one another for ever: times and verdicts.

    python benchmarks/failures.py                       # everything; prints tables, writes docs/failures.md
    python benchmarks/failures.py --only hangs          # parts of it; prints only
    python benchmarks/failures.py --only SIGSTOP        # rows whose names have the word; prints their screens, too
    python benchmarks/failures.py --repeats 1 --healthy 0 --peers no
    python benchmarks/failures.py --device made-up --only failures,hangs    # collectives return when they are queued

Each row starts a script of benchmarks/misfortune/scripts as a user would, at a terminal of its own, and adopts every
process that comes of it, so that the end of the last one is seen. Linux only. The rank that runs out of memory does so
in a control group below this process' own, where one can be made; else it kills itself, and the page says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from misfortune import report, scenarios, verdict
from misfortune.memory import LimitedMemory
from misfortune.scenarios import ELSEWHERE, FAILURES, HANGS, LIGHTNING, NODES_FAILURES, NODES_HANGS, Failure, Hang
from misfortune.screen import since
from misfortune.watched import START, Seen, adopt, watched

PAGE = Path(__file__).resolve().parent.parent / "docs" / "failures.md"
LIMIT = 20.0
"""Seconds after the event in which a run has to end by itself."""
GOES_ON = 3.0
"""Seconds after the naming of a hang in which the run has to end by itself."""
BESIDE = [FAILURES[0], FAILURES[1], FAILURES[7]]
Figures = dict[str, Any]


class Runs:
    """Plays rows, and keeps the verdicts on them."""

    def __init__(self, repeats: int, timeout: float, screens: bool, memory: str) -> None:
        self.repeats, self.timeout, self.screens, self.memory = repeats, timeout, screens, memory

    def play(self, rows: Sequence[Failure | Hang]) -> Figures:
        """All runs of all rows, by the rows' keys."""
        return {row.key: [self._run(row) for _ in range(self.repeats)] for row in rows}

    def _run(self, row: Failure | Hang) -> Figures:
        if isinstance(row, Failure):
            seen = watched(scenarios.of_failure(row, memory=self.memory), LIMIT)
            is_runners = row.start == scenarios.TORCHRUN
            found = asdict(verdict.of_failure(seen, row.rank, row.place, row.says, is_runners))
        else:
            enough = verdict.is_named_for(GOES_ON, row.places)
            seen = watched(scenarios.of_hang(row, self.timeout), LIMIT, enough)
            found = asdict(verdict.of_hang(seen, row.places))
        missed = report.missed_of(row, found, self.timeout)
        print(f"{row.key}: {'; '.join(missed) or 'kept'}", file=sys.stderr, flush=True)
        if self.screens:
            for screen in seen.screens:
                print("\n".join(f"    {line}" for line in since(screen, seen.event or 0.0)), file=sys.stderr)
        return found


def healthy(seconds: float, timeout: float) -> Figures:
    """A run in which nothing happens, for so long."""
    start = time.monotonic()
    words = ["--seconds", str(seconds), "--timeout", str(timeout)]
    seen = watched(scenarios.started(scenarios.DDP, "healthy.py", words, {}), 0.0, start=1.5 * seconds + START)
    return {"run": asdict(verdict.of_health(seen, time.monotonic() - start)), "timeout": timeout}


def gate() -> Figures:
    """Microseconds that the gate adds to a collective, by the kind of call, from a process of its own."""
    words = [sys.executable, "-m", "benchmarks.misfortune.gate_cost"]
    printed = subprocess.run(words, cwd=PAGE.parents[1], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"costs": {kind: float(cost) for kind, cost in re.findall(r"^(\w+): (-?[\d.]+) us$", printed, re.MULTILINE)}}


def beside(limit: float) -> Figures:
    """Some failures and a hang, with lockstep's Trainer and with Lightning's."""

    def plain(seen: Seen) -> Figures:
        lines = [since(screen, seen.event or 0.0) for screen in seen.screens]
        last = (lines[0] or [""])[-1] if seen.ended else ""
        seconds = seen.gone - (seen.event or seen.gone)
        print(f"{library}: {seconds:.1f} s", file=sys.stderr, flush=True)
        return {"seconds": seconds, "ended": seen.ended, "lines": max(map(len, lines)), "last": last}

    found: Figures = {"own": {}, "peers": {}, "limit": limit, "version": importlib.metadata.version("lightning")}
    for library, kept in (("lockstep", found["own"]), (LIGHTNING, found["peers"])):
        for failure in BESIDE:
            kept[failure.name] = plain(watched(scenarios.of_failure(failure, library), limit))
        kept[HANGS[1].name] = plain(watched(scenarios.of_hang(HANGS[1], 3.0, library), limit))
    return found


def versions() -> str:
    """What the figures were taken with."""
    return (
        f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, {os.cpu_count()} CPU cores"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Let ranks fail and stray, and see what comes of it.")
    parser.add_argument("--only", default="", help=f"parts ({', '.join(report.SECTIONS)}), or a part of rows' names")
    parser.add_argument("--repeats", type=int, default=3, help="of each row")
    parser.add_argument("--timeout", type=float, default=3.0, help="hang_timeout of the runs, in seconds")
    parser.add_argument("--healthy", type=float, default=600.0, help="seconds of the healthy run; 0: none")
    parser.add_argument("--peers", choices=["yes", "no"], default="no", help="whether Lightning is run, too")
    parser.add_argument("--figures", type=Path, help="JSON: kept figures of other parts; those measured now go there")
    parser.add_argument("--device", choices=["cpu", "made-up"], default="cpu", help="made-up: prints only")
    args = parser.parse_args()
    wanted = [word for word in args.only.split(",") if word]
    args.parts = [name for name in wanted if name in report.SECTIONS]
    if not wanted:
        left_out = {"healthy": not args.healthy, "peers": args.peers == "no"}
        args.parts = [name for name in report.SECTIONS if not left_out.get(name)]
    words = [word for word in wanted if word not in report.SECTIONS]
    args.rows = [
        row
        for row in [*FAILURES, *ELSEWHERE, *HANGS, *NODES_FAILURES, *NODES_HANGS]
        if any(word in row.key for word in words)
    ]
    if words and not args.rows:
        parser.error(f"--only {','.join(words)}: no part and no row has such a name")
    return args


def main() -> None:
    """Run, judge, print, write."""
    args = arguments()
    if args.device == "made-up":
        autoload = PAGE.parents[1] / "tests" / "accelerator" / "autoload"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(autoload), str(PAGE.parents[1])])
        os.environ["LOCKSTEP_TEST_ACCELERATOR"] = "madeup"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and not without ending the runs
    adopt()
    memory = LimitedMemory()
    try:
        measure(args, memory.folder)
    finally:
        memory.close()


def measure(args: argparse.Namespace, memory: str) -> None:
    """All that is asked for."""
    runs = Runs(args.repeats, args.timeout, bool(args.rows), memory)
    parts: dict[str, Callable[[], Figures]] = {
        "failures": lambda: {"runs": runs.play(FAILURES), "memory": bool(memory)},
        "elsewhere": lambda: {"runs": runs.play(ELSEWHERE)},
        "hangs": lambda: {"runs": runs.play(HANGS), "timeout": args.timeout},
        "nodes": lambda: {"runs": runs.play([*NODES_FAILURES, *NODES_HANGS]), "timeout": args.timeout},
        "healthy": lambda: healthy(args.healthy, args.timeout),
        "gate": gate,
        "peers": lambda: beside(LIMIT),
    }
    if args.rows:
        runs.play(args.rows)
    figures: Figures = {}
    if args.figures and args.figures.exists():
        figures = json.loads(args.figures.read_text())
    for name in args.parts:
        before = os.getloadavg()[0]
        figures[name] = {"found": parts[name](), "load": [before, os.getloadavg()[0]]}
        print(report.section(name, figures[name]), flush=True)
        if args.figures:
            args.figures.write_text(json.dumps(figures))
    missing = [name for name in report.SECTIONS if name not in figures and name != "peers"]
    if missing or args.rows or args.device != "cpu":
        print("docs/failures.md is not written" + (f": without {', '.join(missing)}" if missing else ""))
        return
    report.write(figures, PAGE, f"`python benchmarks/failures.py` ({versions()})")


if __name__ == "__main__":
    main()
