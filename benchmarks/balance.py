"""What balancing gains and costs on ranks of unequal speed: shares of a global batch, and the stages of a pipeline.

    python benchmarks/balance.py             # prints tables
    python benchmarks/balance.py --parts stages
    python benchmarks/balance.py --quick     # small counts, to see that it runs

Each round is a fit with equal and one with balanced shares or stages on the same two ranks, in turns as to which is
first. A figure is the median of the rounds' ratios with its 90 % interval.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

from engine import ranks
from engine.pairs import interval, ratios
from engine.stages import BLOCKS_OF_RANK, MILLISECONDS

from lockstep.extensions.balancing.pipeline.stages import SCHEDULES

SLOWED = (1.0, 2.0, 4.0)
"""By how much the second of two ranks is slower."""
PROMISED = {1.0: 0.98, 2.0: 1.3, 4.0: 1.8}
"""Throughput of balanced shares over that of equal ones, at least."""
PROMISED_OF_STAGES = {1.0: 1.0, 2.0: 1.2, 4.0: 1.2}
"""Throughput of measured stages over that of equal ones, at least."""
WITHIN = 50
"""Steps within which shares settle after a slowdown has moved to the other rank."""
PART, GLOBAL_BATCH = 0.1, 32
"""Shares have settled when none changes by this part of a global batch any more; and the samples of one."""
A_LOOK = 8
"""Steps from one look to the next."""


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gain(kind: str, slow: float, args: argparse.Namespace) -> list[str]:
    """A row: milliseconds of a step, how many times faster, and the shares."""
    found: dict[str, Any] = {"equal": [], "balanced": [], "shares": []}
    for _ in range(args.runs):
        settings = {"kind": kind, "slow": slow, "steps": args.steps, "rounds": args.rounds}
        for name, values in ranks.run("shares:pairs", 2, settings).items():
            found[name] += values
    ratio = ratios(found["equal"], found["balanced"])
    parts = ["/".join(map(str, shares)) for shares in found["shares"]]
    times = [f"{median(found[name]) * 1e3:.1f}" for name in ("equal", "balanced")]
    return [kind, f"{slow:g} x", *times, f"{ratio:.2f}", f"{PROMISED[slow]:g}", max(set(parts), key=parts.count)]


def settles(kind: str, slow: float, args: argparse.Namespace) -> list[str]:
    """A row: after how many steps shares have settled when the slowdown moves, and the shares before and after."""
    at, steps = args.steps, 2 * args.steps + WITHIN
    found = []
    for _ in range(args.runs):
        samples = ranks.run("shares:moved", 2, {"kind": kind, "slow": slow, "at": at, "steps": steps})["samples"]
        changed = [step for step in range(at, steps) if samples[step] != samples[step - 1]]
        # smaller changes later on follow the machine's load
        large = [step for step in changed if abs(samples[step] - samples[step - 1]) > PART * GLOBAL_BATCH]
        found.append((max(large, default=at) - at, samples[at], samples[-1]))
    return [kind, f"{slow:g} x", ", ".join(f"{steps}" for steps, _, _ in found), *map(str, found[-1][1:])]


def costs(args: argparse.Namespace) -> str:
    """A sentence."""
    found = ranks.run("shares:measured", 1, {"steps": 20 * args.steps, "rounds": 4 * args.rounds})
    plain = found.pop("plain")
    each = {name: interval(1e6 * (m - p) for m, p in zip(took, plain, strict=True)) for name, took in found.items()}
    looks = ranks.run("shares:looks", 2, {"rounds": 20 * args.steps})
    settled, odd = (median(looks[name]) * 1e6 for name in ("settled", "odd"))
    return (
        f"CPU time, in us: measuring adds {each['shares']:.1f} to a step, {each['monitor']:.1f} for StragglerMonitor. "
        f"A look, every {A_LOOK}th step, takes {settled:.0f}, or {odd:.0f} where a change is weighed. With "
        f"balance=True that is {each['shares'].median + settled / A_LOOK:.1f} a step in all."
    )


def gain_of_stages(kind: str, slow: float, args: argparse.Namespace) -> list[str]:
    """A row: milliseconds of a step, how many times faster, the splits, and the bottleneck by that of the best one."""
    found: dict[str, Any] = {"equal": [], "measured": [], "splits": [], "over the best": []}
    for _ in range(args.runs):
        settings = {"kind": kind, "slow": slow, "steps": args.steps, "rounds": args.rounds}
        for name, values in ranks.run("stages:pairs", 2, settings).items():
            found[name] += values
    ratio = ratios(found["equal"], found["measured"])
    splits = ["/".join(map(str, split)) for split in found["splits"]]
    times = [f"{median(found[name]) * 1e3:.1f}" for name in ("equal", "measured")]
    over = f"{median(found['over the best']):.2f}, at most {max(found['over the best']):.2f}"
    usual = max(set(splits), key=splits.count)
    return [kind, f"{slow:g} x", *times, f"{ratio:.2f}", f"{PROMISED_OF_STAGES[slow]:g}", usual, over]


def stages_follow(kind: str, slow: float, args: argparse.Namespace) -> list[str]:
    """A row: what was decided in a fit whose slowdown moves to the other rank."""
    at = args.steps // 2
    found = ranks.run("stages:moved", 2, {"kind": kind, "slow": slow, "at": at, "steps": at + 3 * WITHIN})["decisions"]
    told = [f"step {step}: {'/'.join(map(str, after))}" for step, before, after in found if before != after]
    return [kind, f"{slow:g} x", str(at), "; ".join(told)]


def stages(args: argparse.Namespace) -> None:
    """Print the tables of the pipeline."""
    head = [
        "block",
        "one rank slower",
        "ms, equal",
        "ms, measured",
        "equal / measured",
        "promised",
        "split",
        "bottleneck",
    ]
    print(table(head, [gain_of_stages(kind, slow, args) for kind in args.kinds for slow in SLOWED]), "\n", flush=True)
    head = ["block", "one rank slower", "until step", "splits"]
    print(
        table(head, [stages_follow(kind, slow, args) for kind in args.kinds for slow in SLOWED[1:]]), "\n", flush=True
    )
    found = ranks.run("stages:measuring", 2, {"rounds": 10 * args.steps})
    windows, looks = (found[name] * 1e6 for name in ("windows", "looks"))
    print(f"CPU time of measuring, in us a step: {windows:.1f} for the windows, {looks:.1f} to tell others and decide.")


def schedules(args: argparse.Namespace) -> None:
    """Print what a step takes by each schedule, and which part of it is waiting."""
    body = []
    for world, count in ((2, 4), (4, 8)):
        settings = {"names": list(SCHEDULES), "micro_batches": count, "steps": args.steps // 5, "rounds": args.rounds}
        found = ranks.run("stages:schedules", world, settings)
        busy = 3 * BLOCKS_OF_RANK * count * MILLISECONDS
        for name in SCHEDULES:
            took = median(found[name]) * 1e3
            ratio = ratios(found["1f1b"], found[name])
            body.append([f"{world}", f"{count}", name, f"{took:.0f}", f"{1 - busy / took:.0%}", f"{ratio:.2f}"])
    head = ["ranks", "micro-batches", "schedule", "ms a step", "idle", "1f1b / this one"]
    print(table(head, body), "\n", flush=True)


def shares(args: argparse.Namespace) -> None:
    """Print the tables of shares of a batch."""
    head = ["step", "one rank slower", "ms, equal", "ms, balanced", "equal / balanced", "promised", "samples"]
    print(table(head, [gain(kind, slow, args) for kind in args.kinds for slow in SLOWED]), "\n", flush=True)
    head = ["step", "one rank slower", "steps until settled", "samples of rank 0 before", "and after"]
    print(table(head, [settles(kind, slow, args) for kind in args.kinds for slow in SLOWED[1:]]), "\n", flush=True)
    print(costs(args))


PARTS = {"shares": shares, "stages": stages, "schedules": schedules}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure balanced shares.")
    parser.add_argument("--runs", type=int, default=3, help="of each row, each in fresh processes")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of fits in a run")
    parser.add_argument("--steps", type=int, default=90, help="steps of a fit")
    parser.add_argument("--kinds", nargs="+", default=["computes", "sleeps"], help="what takes a rank's time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    parser.add_argument("--quick", action="store_true", help="small counts")
    args = parser.parse_args()
    if args.quick:
        args.runs, args.rounds, args.steps, args.kinds = 1, 1, 60, ["sleeps"]
    load = os.getloadavg()[0]
    for part in args.parts:
        PARTS[part](args)
    print(f"Load average before and after: {load:.1f} and {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
