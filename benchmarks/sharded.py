"""What FSDP and DeepSpeed cost through the Trainer over loops by hand, and which sharding engine is for what.

    python benchmarks/sharded.py             # prints tables, writes docs/sharded-speed.md
    python benchmarks/sharded.py --quick     # small counts, to see that it runs; prints only
    python benchmarks/sharded.py --only deepspeed  # that table alone; prints only

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
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
PROMISED, PROMISED_OF_DEEPSPEED = 1.03, 1.05
DECISION = """\
Both stay, since neither replaces the other:

- `DDPStrategy(shard_optimizer=True)` is for models whose parameters and gradients fit a device and whose optimizer
  states do not. It reduces whole buckets, in shared memory within a host, and works with communication hooks.
- FSDP is for models whose parameters do not fit. On CPUs `fully_shard` copies each block's parameters and gradients
  between flat tensors and their own, and talks by block, which is what the table shows. On GPUs, where those copies
  overlap with computation, nothing has been measured yet."""


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


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure FSDP through the Trainer.")
    parser.add_argument("--runs", type=int, default=3, help="of each race, each in fresh processes")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of a run")
    parser.add_argument("--only", choices=("fsdp", "engines", "deepspeed"), help="one table, nothing written to docs/")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written to docs/")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.rounds = 1, 3
    models = list(MODELS)[:1] if args.quick else list(MODELS)
    load = [os.getloadavg()[0]]
    head = ["model", "Trainer(strategy=)", "ms a step", "ms by hand", "ratio"]
    races = {
        "fsdp": (head, [(mode, mode) for mode in MODES]),
        "engines": ([*head[:3], "ms of fully_shard, by hand", "ratio"], [(each, "SHARD_GRAD_OP") for each in ENGINES]),
        "deepspeed": ([*head[:3], "ms of deepspeed.initialize, by hand", "ratio"], [(each, each) for each in STAGES]),
    }
    tables = {}
    for name, (titles, pairs) in races.items():
        if args.only in (None, name):
            body = [rows(model, strategy, other, args) for model in models for strategy, other in pairs]
            tables[name] = table(titles, body)
            print(tables[name], flush=True)
    if args.quick or args.only:
        return
    load.append(os.getloadavg()[0])
    PAGE.write_text(
        f"""# The speed of sharded training

Written by `python benchmarks/sharded.py` (Python {platform.python_version()}, torch {torch.__version__}, \
{os.cpu_count()} CPU cores, two ranks, gloo). Inside of one fit, a step of the Trainer and a step of a hand-written
loop, in turns; medians of {args.runs * args.rounds} pairs, the ratio with its 90 % interval.

## FSDP through the Trainer, over `fully_shard` by hand

{tables["fsdp"]}

Promised: at most {PROMISED}.

## DeepSpeed through the Trainer, over `deepspeed.initialize` by hand

{tables["deepspeed"]}

Promised: at most {PROMISED_OF_DEEPSPEED}.

## Which engine for optimizer states in shards

Parameters are whole in all of these. `ddp, sharded optimizer` is `DDPStrategy(shard_optimizer=True)`, which reduces in
memory that the ranks of a host share; "TCP" is without that.

{tables["engines"]}

{DECISION}

Load average before and after: {load[0]:.1f} and {load[1]:.1f}.
"""
    )


if __name__ == "__main__":
    main()
