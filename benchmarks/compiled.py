"""What compiled training costs through the Trainer, over loops by hand with ``torch.compile``.

    python benchmarks/compiled.py            # prints a table, for docs/compile.md
    python benchmarks/compiled.py --quick    # a small model, to see that it runs
    python benchmarks/compiled.py --only fsdp

Inside of one fit, a step of the Trainer and then a step of the loop, each from a common start; the slower rank counts.
A figure is the median of the pairs' ratios with its 90 % interval: by the clock, and of processor time in all threads,
which other processes of the machine change less.
"""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median

import torch
from engine import ranks
from engine.pairs import ratios

KINDS = {
    "whole": ("one process, the model compiled", 1),
    "blocks": ("one process, its blocks compiled", 1),
    "ddp": ("ddp, blocks compiled", 2),
    "fsdp": ("fsdp, blocks compiled", 2),
}


def row(kind: str, model: str, rounds: int) -> list[str]:
    """Milliseconds of a step of both, with their minima, and the ratios."""
    name, world = KINDS[kind]
    found = ranks.run("compiled:race", world, {"kind": kind, "model": model, "rounds": rounds, "warmup": 5})
    times = [f"{median(found[each]) * 1e3:.0f} ({min(found[each]) * 1e3:.0f})" for each in ("trainer", "hand")]
    of_cpu = ratios(found["trainer, cpu"], found["hand, cpu"])
    return [name, *times, f"{ratios(found['trainer'], found['hand']):.3f}", f"{of_cpu:.3f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure compiled training through the Trainer.")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of a run")
    parser.add_argument("--only", choices=tuple(KINDS), help="one row")
    parser.add_argument("--quick", action="store_true", help="a small model, few pairs")
    args = parser.parse_args()
    model, rounds = ("tiny:2", 3) if args.quick else ("large:2", args.rounds)
    load = os.getloadavg()[0]
    head = ["", "Trainer, ms a step", "by hand, ms", "ratio", "ratio of processor time"]
    lines = [head, ["---"] * 5, *(row(kind, model, rounds) for kind in KINDS if args.only in (None, kind))]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores"
    print(f"Medians (minima) of {rounds} pairs; load {load:.1f} to {os.getloadavg()[0]:.1f}; {where}.")


if __name__ == "__main__":
    main()
