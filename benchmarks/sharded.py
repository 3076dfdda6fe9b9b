"""What FSDP through the Trainer costs over a hand-written ``fully_shard`` loop, and which sharding engine is for what.

    python benchmarks/sharded.py             # prints tables, writes docs/sharded-speed.md
    python benchmarks/sharded.py --quick     # small counts, to see that it runs; prints only

Times are of pairs: inside of one fit, a step of the Trainer and then a step of the loop, each from a common start; the
slower of two ranks counts. A figure is the median of the pairs' ratios with its 90 % interval, over several runs in
fresh processes.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from statistics import median

import torch
from engine import ranks
from engine.pairs import ratios

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sharded-speed.md"
MODELS = {"middle:8": "GPT, 5 M, 512 bytes a rank", "large:2": "GPT, 25 M, 128 bytes a rank"}
MODES = ("FULL_SHARD", "SHARD_GRAD_OP")
ENGINES = ("ddp, sharded optimizer", "ddp, sharded optimizer, TCP", "SHARD_GRAD_OP")
PROMISED = 1.03


def rows(model: str, strategy: str, by_hand: str, args: argparse.Namespace) -> list[str]:
    """A row: milliseconds of a step of both, and the ratio."""
    ours: list[float] = []
    theirs: list[float] = []
    settings = {"model": model, "strategy": strategy, "by_hand": by_hand, "rounds": args.rounds, "warmup": 5}
    for _ in range(args.runs):
        found = ranks.run("sharded:race", 2, settings)
        ours += found["trainer"]
        theirs += found["hand"]
    ratio = ratios(ours, theirs)
    return [MODELS[model], strategy, f"{median(ours) * 1e3:.1f}", f"{median(theirs) * 1e3:.1f}", f"{ratio:.3f}"]


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure FSDP through the Trainer.")
    parser.add_argument("--runs", type=int, default=3, help="of each race, each in fresh processes")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of a run")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written to docs/")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.rounds = 1, 3
    models = list(MODELS)[:1] if args.quick else list(MODELS)
    load = [os.getloadavg()[0]]
    head = ["model", "Trainer(strategy=)", "ms a step", "ms by hand", "ratio"]
    first = table(head, [rows(model, mode, mode, args) for model in models for mode in MODES])
    print(first, flush=True)
    engines = [rows(model, engine, "SHARD_GRAD_OP", args) for model in models for engine in ENGINES]
    second = table([*head[:3], "ms of fully_shard, by hand", "ratio"], engines)
    print(second, flush=True)
    if args.quick:
        return
    load.append(os.getloadavg()[0])
    PAGE.write_text(
        f"""# The speed of sharded training

Written by `python benchmarks/sharded.py` (Python {platform.python_version()}, torch {torch.__version__}, \
{os.cpu_count()} CPU cores, two ranks, gloo). Inside of one fit, a step of the Trainer and a step of a hand-written
loop, in turns; medians of {args.runs * args.rounds} pairs, the ratio with its 90 % interval.

## FSDP through the Trainer, over `fully_shard` by hand

{first}

Promised: at most {PROMISED}.

## Which engine for optimizer states in shards

Parameters are whole in all of these. `ddp, sharded optimizer` is `DDPStrategy(shard_optimizer=True)`, which reduces in
memory that the ranks of a host share; "TCP" is without that.

{second}

Load average before and after: {load[0]:.1f} and {load[1]:.1f}.
"""
    )


if __name__ == "__main__":
    main()
