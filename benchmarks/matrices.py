"""What a step of Muon costs where ranks own matrices, beside the same step on one process.

    python benchmarks/matrices.py            # prints a table, for docs/finetune.md
    python benchmarks/matrices.py --quick    # small counts, to see that it runs

Rounds of the step on one process, while other ranks wait, and of the step over shards, in turns. Ratios are of pairs.
"""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median

import torch
from engine import ranks
from engine.pairs import ratios


def row(world: int, size: int, count: int, rounds: int) -> list[str]:
    """A line of the table: milliseconds, and what a rank computes as part of its even share."""
    found = ranks.run("matrices:steps", world, {"size": size, "count": count, "rounds": rounds, "warmup": 1})
    even = [seconds / world for seconds in found["alone, computing"]]
    ratio = ratios(found["step, computing"], even)
    times = [f"{median(found[name]) * 1e3:.0f} ({min(found[name]) * 1e3:.0f})" for name in found]
    return [str(world), f"{count} of {size}", *times, f"{ratio:.2f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure Muon's step where ranks own matrices.")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--count", type=int, default=4, help="matrices")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of a run")
    parser.add_argument("--quick", action="store_true", help="small matrices, two ranks")
    args = parser.parse_args()
    if args.quick:
        args.size, args.rounds = 64, 3
    load = os.getloadavg()[0]
    head = ["ranks", "matrices", "one process, ms", "of which computing", "over shards, ms", "of which computing"]
    lines = [[*head, "computing x ranks / that of one process"], ["---"] * 7]
    lines += [row(world, args.size, args.count, args.rounds) for world in ((2,) if args.quick else (2, 4))]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    where = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores"
    print(f"Medians (minima) of {args.rounds} pairs; load {load:.1f} to {os.getloadavg()[0]:.1f}; {where}.")


if __name__ == "__main__":
    main()
