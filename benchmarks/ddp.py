"""What the DDP engine costs and saves: against torch's DistributedDataParallel, local steps, and a slow network.

    python benchmarks/ddp.py                        # everything; prints tables, writes docs/ddp-speed.md and .png
    python benchmarks/ddp.py --only tcp,shared      # parts of it; prints only
    python benchmarks/ddp.py --quick                # small counts, to see that it runs; prints only
    python benchmarks/ddp.py --device cuda          # on a machine with a GPU: part "gpu" too

Times are of pairs: each round plays every contestant once, in turns as to which is first, from a common start, and
the slower rank counts. A figure is the median of the rounds' ratios with its 90 % interval, over several runs in
fresh processes. Part "link" needs root, for network namespaces; without, it is left out and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine import cost, ranks, report
from engine.equal_time import over_the_link
from engine.link import obstacle
from engine.methods import FEEDBACK, HOOKS, NO_FEEDBACK, NONE, TORCH

DOCS = Path(__file__).resolve().parent.parent / "docs"
Figures = dict[str, Any]


def repeated(runs: int, function: str, world: int = 2, **settings: Any) -> dict[str, list[float]]:
    """The rounds of `engine.race.race` of all runs, one after another."""
    whole: dict[str, list[float]] = {}
    for _ in range(runs):
        for kind, seconds in ranks.run(function, world, settings).items():
            whole.setdefault(kind, []).extend(seconds)
    return whole


def part_cost(args: argparse.Namespace) -> Figures:
    """CPU time of the reducer for each parameter tensor."""
    return {"rounds": cost.measure(args.rounds * args.runs * 5)}


def part_tcp(args: argparse.Namespace) -> Figures:
    """Ours over torch's, both over gloo's TCP."""
    kinds = ["torch, views", "torch", "lockstep, TCP"]
    settings = {"kinds": kinds, "rounds": args.rounds, "warmup": args.warmup}
    return {name: repeated(args.runs, "race:race", model=name, **settings) for name in report.TCP}


def part_shared(args: argparse.Namespace) -> Figures:
    """A step with gradients reduced in shared memory over a step without any reduction."""
    kinds = ["local", "torch, views", "lockstep, shared", "lockstep, shared, static"]
    settings = {"kinds": kinds, "rounds": args.rounds, "warmup": args.warmup}
    return {name: repeated(args.runs, "race:race", model=name, **settings) for name in report.SHARED}


def part_dp(args: argparse.Namespace) -> Figures:
    """One process with two threads beside two processes."""
    kinds = ["dp", "lockstep, shared"]
    settings = {"kinds": kinds, "rounds": args.rounds, "warmup": args.warmup}
    return {name: repeated(args.runs, "race:race", model=name, **settings) for name in report.DP}


def part_bits(args: argparse.Namespace) -> Figures:
    """Elements of gradients whose bits are not torch's."""
    found = {}
    for world in (2, 3, 4):
        kinds = ["laid out, TCP", "lockstep, TCP"]
        if world == 2:
            kinds += ["lockstep, shared", "lockstep, TCP, static", "lockstep, TCP, copies"]
        counted = ranks.run("bits:differing", world, {"model": "small:2", "kinds": kinds, "steps": args.few})
        found |= {f"{world} {kind}": counts for kind, counts in counted.items()}
    return found


def part_wire(args: argparse.Namespace) -> Figures:
    """Bytes that a rank sends in a step."""
    return {hook: ranks.run("wire:sent", 2, {"model": args.counted, "hook": hook}) for hook in HOOKS[:4]}


def part_memory(args: argparse.Namespace) -> Figures:
    """Bytes that the container and its hook keep."""
    cases = {
        "gradients are views": ("lockstep, TCP", NONE),
        "gradients are copies": ("lockstep, TCP, copies", NONE),
        FEEDBACK: ("lockstep, TCP", FEEDBACK),
        NO_FEEDBACK: ("lockstep, TCP", NO_FEEDBACK),
    }
    return {
        label: ranks.run("wire:kept", 2, {"model": args.counted, "kind": kind, "hook": hook})
        for label, (kind, hook) in cases.items()
    }


def part_link(args: argparse.Namespace) -> Figures:
    """All methods for the same time over 100 Mbit/s."""
    reason = obstacle()
    if reason is not None:
        return {"left out": reason}
    methods = [TORCH, *(hook for hook in HOOKS if hook != NO_FEEDBACK)]
    settings = {"methods": methods, "budget": args.budget, "size": args.link_size, "batch": args.link_batch, "lr": 1e-3}
    return over_the_link(100, settings)


def part_powersgd(args: argparse.Namespace) -> Figures:
    """Losses after the same number of steps."""
    settings = {"steps": args.steps, "size": "tiny", "batch": 8, "lr": 0.03, "start": 2}
    found = ranks.run("equal_time:after_steps", 2, {"methods": [NONE, FEEDBACK, NO_FEEDBACK], **settings})
    return {"steps": args.steps, "losses": found}


def part_gpu(args: argparse.Namespace) -> Figures:
    """On a GPU: NCCL with one rank; two ranks on one card over gloo, views against copies."""
    settings = {"rounds": args.rounds, "warmup": args.warmup, "device": "cuda"}
    alone = {"kinds": ["local", "torch, views", "lockstep"], "backend": "cpu:gloo,cuda:nccl", **settings}
    two = {"kinds": ["local", "torch, views", "torch", "lockstep", "lockstep, copies"], **settings}
    return {
        "NCCL, 1 rank": repeated(args.runs, "race:race", 1, model="large:8", **alone),
        "gloo, 2 ranks": repeated(args.runs, "race:race", 2, model="large:8", **two),
    }


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "cost": part_cost,
    "tcp": part_tcp,
    "shared": part_shared,
    "bits": part_bits,
    "wire": part_wire,
    "memory": part_memory,
    "dp": part_dp,
    "link": part_link,
    "powersgd": part_powersgd,
    "gpu": part_gpu,
}


def versions() -> str:
    """What the figures were taken with."""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPU cores"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure lockstep's DDP engine.")
    parser.add_argument("--only", default="", help=f"parts with commas between them: {', '.join(PARTS)}")
    parser.add_argument("--runs", type=int, default=3, help="of each race, each in fresh processes")
    parser.add_argument("--rounds", type=int, default=70, help="pairs of a run")
    parser.add_argument("--budget", type=float, default=60, help="seconds for each method over the slow link")
    parser.add_argument("--steps", type=int, default=500, help="of the language model for PowerSGD")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: measure part gpu too")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written to docs/")
    parser.add_argument("--figures", type=Path, help="JSON: kept figures of other parts; those measured now go there")
    args = parser.parse_args()
    args.warmup, args.few, args.link_size, args.link_batch, args.counted = 5, 10, "middle", 2, "middle:1"
    if args.quick:
        args.runs, args.rounds, args.warmup, args.few, args.budget, args.steps = 1, 6, 3, 3, 6, 20
        args.link_size = "small"
    wanted = [name for name in args.only.split(",") if name] or [
        n for n in PARTS if n != "gpu" or args.device == "cuda"
    ]
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        parser.error(f"--only {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    args.parts = wanted
    return args


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    torch.set_num_threads(1)
    figures: Figures = {}
    if args.figures and args.figures.exists():
        figures = json.loads(args.figures.read_text())
    for name in args.parts:
        before = os.getloadavg()[0]
        found = PARTS[name](args)
        figures[name] = {"found": found, "load": [before, os.getloadavg()[0]]}
        print(report.section(name, figures[name]), flush=True)
        if args.figures:
            args.figures.write_text(json.dumps(figures))
    missing = [name for name in PARTS if name not in figures and name != "gpu"]
    if args.quick or missing:
        print("docs/ddp-speed.md is not written: " + ("--quick" if args.quick else f"without {', '.join(missing)}"))
        return
    report.write(figures, DOCS, f"`python benchmarks/ddp.py` ({versions()})")


if __name__ == "__main__":
    main()
