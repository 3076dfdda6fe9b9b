"""Random failures over engines and launchers: how often the last line names the rank, and where or how it failed.

    python benchmarks/random_failures.py --runs 200 --seed 1

A full disk is a tmpfs of 2 MB, for which one has to be root. Under torchrun our last line counts, which its own report
follows.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from misfortune.scenarios import free_port

SCRIPT = Path(__file__).resolve().parent / "misfortune" / "scripts" / "randoms.py"
LIMIT = 90.0
"""Seconds for a run."""
EXCEPTIONS = ("forward", "backward", "hook", "callback", "validation", "save", "worker")
HANGS = ("barrier", "gather")
ENDS = {"killed": r"SIGKILL|is gone", "crashed": r"SIGSEGV|is gone", "exit": r"exit code 7|is gone"}
FAULTS = (*EXCEPTIONS, *EXCEPTIONS, *HANGS, *ENDS, "stopped", "shape", "disk")
ENGINES = ("ddp", "ddp", "fsdp", "sharded", "balanced", "deepspeed_stage_2")
STARTS = ("python", "python", "nodes", "nodes", "hosts", "lockstep run", "torchrun", "ddp_spawn", "ddp_fork")


@dataclass(frozen=True)
class Case:
    """One run."""

    start: str
    engine: str
    fault: str
    rank: int

    @property
    def wanted(self) -> str:
        """What the last line has to match."""
        who = rf"\brank {self.rank}\b"
        if self.fault in EXCEPTIONS:
            return rf"{who}[^;]*{line(self.fault)}: \w*Error"
        if self.fault in ENDS:
            return rf"{who}.*({ENDS[self.fault]})"
        if self.fault == "stopped":
            return rf"{who} is stopped"
        if self.fault == "disk":
            writes = "[01]" if self.engine == "sharded" else "0"  # where each rank writes a part, either may be first
            return rf"\brank {writes}\b.*(there is no room|No space left).*make room"
        return rf"{who}[^;]*{line(self.fault)}"


def line(mark: str) -> str:
    """File and line of the script that ends with a mark."""
    lines = SCRIPT.read_text().splitlines()
    return f"randoms\\.py:{next(at for at, text in enumerate(lines, 1) if text.endswith(f'# {mark}'))}"


def drawn(draw: random.Random) -> Case:
    """A case that there is."""
    while True:
        case = Case(draw.choice(STARTS), draw.choice(ENGINES), draw.choice(FAULTS), draw.randrange(2))
        forks = case.start in ("ddp_spawn", "ddp_fork")
        if forks and case.engine != "ddp":
            continue
        if case.engine == "balanced" and case.fault in ("validation", "shape", "gather", "barrier", "backward", "hook"):
            continue  # pipelines do not run the user's step on all ranks alike
        if case.fault == "save" and case.rank and case.engine == "balanced":
            continue
        return case


@contextmanager
def disk(full: bool) -> Iterator[str]:
    """A folder, of which a full disk has 2 MB."""
    folder = tempfile.mkdtemp(prefix="random-failures-")
    if full:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        if full:
            subprocess.run(["umount", "-l", folder], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def commands(case: Case, folder: str) -> list[tuple[list[str], dict[str, str]]]:
    """The words of each node, with variables."""
    nodes = case.start in ("nodes", "hosts")
    engine = case.start if case.start.startswith("ddp_") else case.engine
    words = [str(SCRIPT), engine, "1" if nodes else "2", case.fault, str(case.rank), folder]
    if nodes:
        meeting = {"NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        python = [sys.executable, *words]
        if case.start == "hosts":  # of other names, so that nothing is shared by memory
            python = ["unshare", "--uts", "sh", "-c", 'hostname "host$NODE_RANK"; exec "$@"', "sh", *python]
        return [(python, {**meeting, "NODE_RANK": str(node)}) for node in range(2)]
    launch = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "lockstep run": [sys.executable, "-m", "lockstep", "run", "--devices", "2"],
    }
    return [([*launch.get(case.start, [sys.executable]), *words], {})]


def play(case: Case) -> list[str]:
    """One run; the last lines that are wrong."""
    with disk(case.fault == "disk") as folder:
        processes = [
            subprocess.Popen(
                words,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
            for words, environ in commands(case, folder)
        ]
        screens, until = [], time.monotonic() + LIMIT
        for process in processes:
            try:
                said = process.communicate(timeout=max(0.1, until - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0] + b"\n(did not end)"
            screens.append(said.decode(errors="replace").rstrip("\n").split("\n"))
        lasts = [last_of(screen, case.start == "torchrun") for screen in screens]
        return [last for last in lasts if not re.search(case.wanted, last)]


def last_of(screen: list[str], by_torchrun: bool) -> str:
    """The last line; under torchrun the last of ours."""
    own = [text for text in screen if re.match(r"(\[rank\d+\]: ?)?lockstep: ", text)]
    return own[-1] if by_torchrun and own else screen[-1]


def main() -> None:
    """Play, and count."""
    parser = argparse.ArgumentParser(description="Let ranks fail at random, and read the last line.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further run begins")
    args = parser.parse_args()
    draw, right, wrong, until = random.Random(args.seed), 0, Counter[str](), time.monotonic() + 60 * args.minutes
    for number in range(args.runs):
        if time.monotonic() > until:
            break
        case = drawn(draw)
        lasts = play(case)
        right += not lasts
        if lasts:
            wrong[case.fault] += 1
        print(
            f"{number + 1} {'right' if not lasts else 'WRONG'} {case}",
            *[f"    {each[:400]}" for each in lasts],
            sep="\n",
            flush=True,
        )
    print(f"right: {right} of {right + sum(wrong.values())}; wrong: {dict(wrong)}")


if __name__ == "__main__":
    main()
