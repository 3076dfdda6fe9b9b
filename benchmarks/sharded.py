"""FSDP and DeepSpeed through the Trainer, compared with hand-written loops.

    python benchmarks/sharded.py             # prints tables, writes them into docs/sharded-speed.md
    python benchmarks/sharded.py --quick     # small counts, to see that it runs; prints only
    python benchmarks/sharded.py --only deepspeed  # that table alone

Times are of pairs: inside of one fit, a step of the Trainer and then a step of the loop, each from a common start; the
slower of two ranks counts. A figure is the median of the pairs' ratios with its 90 % interval, over several runs in
fresh processes.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from pathlib import Path
from statistics import median

import torch
from engine import ranks
from engine.pairs import ratios

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sharded-speed.md"
MODELS = {"middle:8": "GPT, 5 M, 512 bytes a rank", "large:2": "GPT, 25 M, 128 bytes a rank"}
MODES = ("FULL_SHARD", "SHARD_GRAD_OP")
ENGINES = ("ddp, sharded optimizer", "ddp, sharded optimizer, TCP", "SHARD_GRAD_OP")
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
HEADINGS = {
    "fsdp": "## FSDP compared with `fully_shard`",
    "deepspeed": "## DeepSpeed compared with `deepspeed.initialize`",
    "engines": "## Strategies that shard optimizer states",
}
"""Of the page, by table."""


def rows(model: str, strategy: str, other: str, args: argparse.Namespace) -> list[str]:
    """A row: milliseconds of a step of both, and the ratio."""
    ours: list[float] = []
    theirs: list[float] = []
    settings = {"model": model, "strategy": strategy, "other": other, "rounds": args.rounds, "warmup": 5}
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


def replaced(page: str, heading: str, body: str, said: str) -> str:
    """The page with another table under a heading, and with what is said below it."""
    pattern = rf"({re.escape(heading)}\n[^|]*)\|.*?\n\nMedians of [^\n]*"
    found, count = re.subn(pattern, lambda match: f"{match[1]}{body}\n\n{said}", page, count=1, flags=re.DOTALL)
    if not count:
        raise ValueError(f"{PAGE.name} has no table under {heading!r}")
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure FSDP through the Trainer.")
    parser.add_argument("--runs", type=int, default=3, help="of each race, each in fresh processes")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of a run")
    parser.add_argument("--only", choices=("fsdp", "engines", "deepspeed"), help="one table")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written to docs/")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.rounds = 1, 3
    models = list(MODELS)[:1] if args.quick else list(MODELS)
    head = ["model", "Trainer(strategy=)", "ms a step", "ms by hand", "ratio"]
    races = {
        "fsdp": (head, [(mode, mode) for mode in MODES]),
        "engines": ([*head[:3], "ms of fully_shard, by hand", "ratio"], [(each, "SHARD_GRAD_OP") for each in ENGINES]),
        "deepspeed": ([*head[:3], "ms of deepspeed.initialize, by hand", "ratio"], [(each, each) for each in STAGES]),
    }
    for name, (titles, pairs) in races.items():
        if args.only not in (None, name):
            continue
        load = os.getloadavg()[0]
        body = table(titles, [rows(model, strategy, other, args) for model in models for strategy, other in pairs])
        print(body, flush=True)
        if not args.quick:
            loads = f"load average before and after: {load:.1f} and {os.getloadavg()[0]:.1f}"
            where = f"Python {platform.python_version()}, torch {torch.__version__}"
            said = f"Medians of {args.runs * args.rounds} pairs; {loads}; {where}."
            PAGE.write_text(replaced(PAGE.read_text(), HEADINGS[name], body, said))


if __name__ == "__main__":
    main()
