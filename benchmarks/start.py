"""Startup time of a run on two ranks: from the start of its process to the end of the first step.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/start.py

A hand-written DistributedDataParallel script under torchrun, and the same training by lockstep's Trainer: started by
itself (strategy="ddp"), under torchrun, by "ddp_spawn" and by "ddp_fork". Each round starts each of them once, in
another order, so that a busy machine is busy for all. The first round fills the file caches and does not count. Prints
a table; writes docs/start.md.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # found as `benchmarks`, as the tests find it

from benchmarks.engine.pairs import Interval, ratios, turns

DOCS = Path(__file__).resolve().parent.parent / "docs"
RANKS = 2
PR_SET_CHILD_SUBREAPER = 36
LIMIT = 1.2
"""Times the hand-written script's start that strategy="ddp" may take."""

COMMON = """
import os, sys, time
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def stepped(rank):  # the first step of a rank is done
    at = time.monotonic()
    os.write(1, f"stepped {rank} {at}\\n".encode())
    while "HOLD" in os.environ and not os.path.exists(os.environ["HOLD"]):
        time.sleep(0.01)

def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(64, 32), torch.randn(64, 1))

def layers():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
"""
BY_HAND = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = data()
    for inputs, targets in DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples)):
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stepped(dist.get_rank())
        break
    dist.barrier()
    os._exit(0)  # Python's own end meets gloo's threads, and is a SIGABRT in one of five

main()
"""
BY_TRAINER = """
from lockstep import LightningModule, Trainer

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = layers()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        stepped(self.global_rank)

trainer = Trainer(
    accelerator="cpu", devices=2, strategy=sys.argv[1], max_steps=1, logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(data(), batch_size=4, shuffle=True))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
HAND = "hand-written, torchrun"
WAYS = {
    HAND: [*TORCHRUN, "by_hand.py"],
    'lockstep, "ddp"': ["by_trainer.py", "ddp"],
    "lockstep, torchrun": [*TORCHRUN, "by_trainer.py", "ddp"],
    'lockstep, "ddp_spawn"': ["by_trainer.py", "ddp_spawn"],
    'lockstep, "ddp_fork"': ["by_trainer.py", "ddp_fork"],
}
"""Name to what follows ``python`` on its command line."""


@dataclass(frozen=True)
class Start:
    """One start of two ranks."""

    wall: float  #: seconds to the end of the first step of the last rank
    whole: float  #: seconds to the end of the last process
    cpu: float  #: seconds of processor time of all processes, from their starts to their ends


def steps_in(printed: str) -> dict[int, float]:
    """When the ranks had done their first steps, on the clock of ``time.monotonic``.

    Example:
        >>> steps_in("stepped 1 20.5\\nsomething else\\nstepped 0 20.25\\n")
        {1: 20.5, 0: 20.25}
    """
    lines = [line.split() for line in printed.splitlines() if line.startswith("stepped ")]
    return {int(rank): float(at) for _, rank, at in lines}


def environment() -> dict[str, str]:
    """With compiled files, as installed packages have them, and one computing thread in each rank."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def take_in_orphans() -> None:
    """Become the parent of processes below this one whose own parents have ended, so that their time is counted."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(way: str, folder: Path) -> Start:
    """Start it, and see it through to its end."""
    used = processor_time()
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *WAYS[way]], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    with contextlib.suppress(ChildProcessError):
        while True:  # those that their parents did not wait for
            os.waitpid(-1, 0)
    ended = time.monotonic()
    steps = steps_in(done.stdout)
    if done.returncode or len(steps) != RANKS:
        raise RuntimeError(f"{way}: exit code {done.returncode}, steps of ranks {sorted(steps)}\n{done.stderr[-3000:]}")
    return Start(max(steps.values()) - began, ended - began, processor_time() - used)


def processor_time() -> float:
    """Of all processes that have ended below this one."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def memory(way: str, folder: Path) -> float:
    """MiB of all its processes after the first step; what several share is counted once, in equal parts (PSS)."""
    gate = folder / "gate"
    environ = {**environment(), "HOLD": str(gate)}
    with subprocess.Popen(
        [sys.executable, *WAYS[way]],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        printed = ""
        while len(steps_in(printed)) < RANKS:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{way} ended before its first step")
            printed += line
        time.sleep(0.2)
        found = sum(proportional_set_size(each) for each in members(process.pid))
        gate.touch()
        process.communicate()
    gate.unlink()
    return found


def members(session: int) -> list[int]:
    """The processes of a session, and all that descend from them, torchrun's workers in sessions of their own too."""
    parents, sessions = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = entry.read_text().rpartition(")")[2].split()
            number = int(entry.parent.name)
            parents[number], sessions[number] = int(fields[1]), int(fields[3])
    found = {number for number, its in sessions.items() if its == session}
    while more := {number for number, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def proportional_set_size(process: int) -> float:
    """MiB of a process, 0 where it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def measure(rounds: int, folder: Path) -> dict[str, list[Start]]:
    """Each way once a round."""
    found: dict[str, list[Start]] = {way: [] for way in WAYS}
    for way in WAYS:
        start(way, folder)
    for number, order in enumerate(turns(list(WAYS), rounds)):
        for way in order:
            found[way].append(start(way, folder))
        load = os.getloadavg()[0]
        print(f"round {number + 1} of {rounds} done, load average {load:.1f}", file=sys.stderr, flush=True)
    return found


def table(starts: Mapping[str, Sequence[Start]], pss: Mapping[str, float]) -> str:
    """All that was measured, as Markdown."""
    rows = [
        f"| two ranks | first step, s | smallest | × {HAND} | promised | to the end, s "
        "| CPU, s | smallest | PSS, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = [each.wall for each in starts[HAND]]
    for way, found in starts.items():
        walls, cpu = [each.wall for each in found], [each.cpu for each in found]
        over = "" if way == HAND else f"{ratios(walls, base):.2f}"
        promised = f"≤ {LIMIT}" if way == 'lockstep, "ddp"' else ""
        end = median(each.whole for each in found)
        rows.append(
            f"| {way} | {median(walls):.2f} | {min(walls):.2f} | {over} | {promised} | {end:.2f} "
            f"| {median(cpu):.2f} | {min(cpu):.2f} | {pss[way]:.0f} |"
        )
    return "\n".join(rows)


def verdict(over: Interval) -> str:
    """Whether the promise is kept, as far as the rounds tell."""
    if over.high <= LIMIT:
        return f'lockstep, "ddp" keeps its promise: {over:.2f} ≤ {LIMIT}'
    if over.low > LIMIT:
        return f'lockstep, "ddp" breaks its promise: {over:.2f} > {LIMIT}'
    return f'lockstep, "ddp" at {over:.2f}, promised ≤ {LIMIT}: more rounds would tell'


def page(text: str, rounds: int, load: tuple[float, float]) -> str:
    """docs/start.md."""
    about = f"Python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} CPU cores"
    return f"""# Startup time

This page compares how fast a run on two ranks (processes) starts with each start method.
Written by `python benchmarks/start.py --rounds {rounds}`
({about}; load average {load[0]:.1f} before, {load[1]:.1f} after).

{text}

- `ddp` runs the script once for each rank. The process that you start is itself one of the ranks. With torchrun, the
  process that you start is torchrun's agent, so one more process has to import torch.
- `ddp_spawn` starts its ranks when `fit` is called, after the script has imported torch.
- `ddp_fork` forks the calling process. The ranks start at once and share memory with it. A second `fit` starts within
  tenths of a second.

The time is measured from the start of the process to the end of the last rank's first optimizer step. The model is a
small network on the CPU, with gloo, without logger and callbacks. Each of the {rounds} rounds runs every method once,
in a different order, after one round that fills the file caches. The columns of the table:

- Times are medians. The "smallest" columns show the minimum.
- "× hand-written, torchrun" is the median of the rounds' ratios to that row, with its 90 % interval in brackets.
- "CPU, s" is the CPU time of all processes, including their exit.
- "PSS, MiB" is the memory of all processes after the first step, measured in a separate run. Shared memory is counted
  once.
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure how long a run on two ranks takes to begin.")
    parser.add_argument("--rounds", type=int, default=8, help="each starts every way once; an even number")
    parser.add_argument("--write", type=Path, default=DOCS / "start.md", help="the page; '' for none")
    args = parser.parse_args()
    take_in_orphans()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "by_hand.py").write_text(COMMON + BY_HAND)
        (folder / "by_trainer.py").write_text(COMMON + BY_TRAINER)
        before = os.getloadavg()[0]
        print(f"load average {before:.1f}", file=sys.stderr)
        starts = measure(args.rounds, folder)
        pss = {way: memory(way, folder) for way in WAYS}
        after = os.getloadavg()[0]
    text = table(starts, pss)
    over = ratios([each.wall for each in starts['lockstep, "ddp"']], [each.wall for each in starts[HAND]])
    print(f"{text}\n\nload average {before:.1f} before, {after:.1f} after\n{verdict(over)}")
    if args.write.name:
        args.write.write_text(page(text, args.rounds, (before, after)))


if __name__ == "__main__":
    main()
