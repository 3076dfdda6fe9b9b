"""How often runs end as they should: without an abort, and with the first cause as the last line.

    python benchmarks/culprits.py                        # all rows, 50 runs each, calm and beside busy loops
    python benchmarks/culprits.py --runs 5 --only gather # fewer of one row

Each run starts a script of two ranks as a user would. A row's runs count as kept where the exit code is right and the
last line names rank, line and reason; the last line of the first run that was not is printed below the table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "misfortune" / "scripts" / "culprits.py"
LIMIT = 120.0
"""Seconds for a run."""


@dataclass(frozen=True)
class Row:
    """One way to end.

    Attributes:
        name: of the row, and of the way in the script.
        what: happens.
        last: what the last line has to match; "": the run ends well.
        torchrun: whether torchrun starts the ranks.
    """

    name: str
    what: str
    last: str = ""
    torchrun: bool = False

    def command(self, folder: str) -> list[str]:
        """The words that start a run."""
        words = [str(SCRIPT), self.name]
        if self.name == "overhead":
            words = [str(HERE / "overhead.py"), "--this-rank", f"{folder}/report.json", "--runs", "1", "--steps", "200"]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if self.torchrun else []
        return [sys.executable, *launch, *words]


def line(mark: str) -> int:
    """The line of the script that ends with a mark."""
    lines = SCRIPT.read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def rows() -> list[Row]:
    """All of them."""
    where = re.escape(str(SCRIPT))
    return [
        Row("lockstep", "a hand-written loop with lockstep's container, destroyed after its last step", torchrun=True),
        Row("torch", "the same with torch's class (nobody settles its threads)", torchrun=True),
        Row("overhead", "benchmarks/overhead.py, its part on two ranks", torchrun=True),
        Row(
            "message",
            "a message of several lines forges the cause",
            f"rank 1 failed first, at {where}:{line('message')}:",
        ),
        Row("hook", "a hook's future raises in its callback", f"rank 1 failed first, at {where}:{line('hook')}:"),
        Row("gather", "all_gathers of other sizes", f"calls do not match: .*{where}:{line('gather')}"),
        Row("fsdp", "FSDP's all_gathers of other sizes", f"calls do not match: .*{where}:{line('fsdp')}"),
    ]


def play(row: Row) -> str:
    """One run; what is wrong with it, or ""."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = subprocess.run(
                row.command(folder), capture_output=True, timeout=LIMIT, env=environ, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {LIMIT:g} s"
    said = ended.stderr.decode(errors="replace").rstrip("\n").split("\n")
    if not row.last:
        return "" if ended.returncode == 0 else f"exit code {ended.returncode}: {said[-1][:300]}"
    if re.match(f"lockstep: .*{row.last}", said[-1]) and ended.returncode == 1 and len(said) <= 40:
        return ""
    return f"exit code {ended.returncode}, {len(said)} lines: {said[-1][:300]}"


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Inside, so many loops compute beside us, at a lower priority."""
    words = ["nice", "-n", "5", sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in range(loops)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Play, and print the table."""
    parser = argparse.ArgumentParser(description="Count runs that end as they should, and name the right rank.")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", default="", help="rows whose names have the word")
    parser.add_argument("--calm", action="store_true", help="without busy loops only")
    args = parser.parse_args()
    table = ["| what happens | machine | kept |", "|---|---|---|"]
    notes = []
    for name, loops in (("calm", 0), ("loaded", 2 * (os.cpu_count() or 1)))[: 1 if args.calm else 2]:
        for row in rows():
            if args.only not in row.name:
                continue
            with busy(loops):
                found = [play(row) for _ in range(args.runs)]
            kept = found.count("")
            table.append(f"| {row.what} | {name} | {kept} of {args.runs} |")
            notes += [f"{row.name}, {name}: {next(filter(None, found))}"] if kept < args.runs else []
            print(table[-1], file=sys.stderr, flush=True)
    print("\n".join([*table, "", *notes]))


if __name__ == "__main__":
    main()
