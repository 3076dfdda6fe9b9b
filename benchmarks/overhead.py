"""What a trainer costs: lockstep, Lightning and Accelerate against the same steps in a hand-written loop.

    pip install -c constraints.txt -e ".[bench]"
    python benchmarks/overhead.py

Everything is measured in one run and interleaved (hand-written, lockstep, Lightning, Accelerate, and again),
so that a busy machine is busy for all; the figures are differences of the smallest CPU times. The model is as
small as can be, since the model is not what is measured. Prints a table; writes docs/overhead.md and
docs/overhead.png.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DOCS = Path(__file__).resolve().parent.parent / "docs"
BATCH = 4
LIBRARIES = {"lockstep": "lockstep", "Lightning": "lightning.pytorch", "Accelerate": "accelerate"}
Clock = Callable[[], float]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


@dataclass(frozen=True)
class Logged:
    """What a training step logs."""

    label: str
    values: int
    options: tuple[str, ...] = ()  # flags of self.log that are set


NOTHING = Logged("nothing logged", 0)
LOGGED = [
    NOTHING,
    Logged("1 value logged", 1),
    Logged("8 values logged", 8),
    Logged("1 value, on_step + on_epoch + prog_bar", 1, ("on_step", "on_epoch", "prog_bar")),
]
INSTRUCTIONS, INSTRUCTIONS_A_VALUE = 600, 130
"""Most bytecode instructions that lockstep adds to a step, and to it for each logged value."""
DEFAULTS = "nothing logged, with progress bar, CSVLogger and ModelCheckpoint"


def samples(steps: int, ranks: int = 1) -> TensorDataset:
    """Random pairs of 8 numbers and 1 number, for so many steps of each rank."""
    generator = torch.Generator().manual_seed(0)
    count = steps * BATCH * ranks
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 1, generator=generator))


def by_hand(model: nn.Module, loader: DataLoader[Any], clock: Clock = time.process_time) -> float:
    """CPU seconds of the loop that everything else is compared with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = clock()
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return clock() - start


def with_accelerate(loader: DataLoader[Any]) -> float:
    """CPU seconds of the same loop by Accelerate's rules."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model: nn.Module = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = time.process_time()
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return time.process_time() - start


def make_module(package: Any, logged: Logged, clock: Clock) -> Any:
    """The same step as a LightningModule, with a clock that runs from on_train_start to on_train_end."""
    names = [f"value_{index}" for index in range(logged.values)]
    options = dict.fromkeys(logged.options, True)

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)
            self.seconds = 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            inputs, targets = batch
            loss = mse_loss(self.layer(inputs), targets)
            for name in names:
                self.log(name, loss, **options)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_start(self) -> None:
            self.seconds = clock()

        def on_train_end(self) -> None:
            self.seconds = clock() - self.seconds

    return Module()


def with_trainer(
    package_name: str,
    loader: DataLoader[Any],
    logged: Logged,
    clock: Clock = time.process_time,
    **flags: Any,
) -> float:
    """CPU seconds of the training loop of a Trainer, its set-up left out."""
    package = importlib.import_module(package_name)
    module = make_module(package, logged, clock)
    package.Trainer(**{"devices": 1, **QUIET, **flags}).fit(module, loader)
    seconds: float = module.seconds
    return seconds


def with_defaults(package_name: str, loader: DataLoader[Any]) -> float:
    """The same with what a Trainer has by default; what the bar and the summary print goes nowhere."""
    loggers = importlib.import_module(f"{package_name}.loggers")
    shown = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "enable_model_summary"), True)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            logger = loggers.CSVLogger(folder)
            return with_trainer(package_name, loader, NOTHING, logger=logger, default_root_dir=folder, **shown)


def interleaved(variants: dict[str, Callable[[], float]], runs: int, steps: int) -> dict[str, float]:
    """Microseconds a step of each variant, the smallest of several rounds; a round runs each once."""
    best = dict.fromkeys(variants, float("inf"))
    for run in range(runs):
        for name, measure in variants.items():
            torch.manual_seed(0)
            gc.collect()  # what one leaves behind is not cleared away in another's time
            best[name] = min(best[name], measure() / steps * 1e6)
        print(f"round {run + 1} of {runs} done", file=sys.stderr)
    return best


def one_process(runs: int, steps: int) -> dict[str, float]:
    """All libraries and all amounts of logging."""
    loader = DataLoader(samples(steps), batch_size=BATCH, shuffle=True)
    variants: dict[str, Callable[[], float]] = {"hand-written": lambda: by_hand(nn.Linear(8, 1), loader)}
    for logged in LOGGED:
        for library in ("lockstep", "Lightning"):
            package = LIBRARIES[library]
            variants[f"{library}, {logged.label}"] = lambda package=package, logged=logged: with_trainer(  # type: ignore[misc]
                package, loader, logged
            )
    for library in ("lockstep", "Lightning"):
        package = LIBRARIES[library]
        variants[f"{library}, {DEFAULTS}"] = lambda package=package: with_defaults(package, loader)  # type: ignore[misc]
    variants[f"Accelerate, {NOTHING.label}"] = lambda: with_accelerate(loader)
    return interleaved(variants, runs, steps)


def work_of(run: Callable[[], object]) -> tuple[int, int]:
    """Return the calls of Python functions and the bytecode instructions of this thread while a function runs."""
    calls = instructions = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal calls, instructions
        if event == "call":
            calls += 1
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        elif event == "opcode":
            instructions += 1
        return trace

    gc.collect()
    gc.disable()  # a collection calls finalizers of earlier runs
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
        gc.enable()
    return calls, instructions


def counted(steps: int = 100) -> dict[str, list[float]]:
    """Return the calls and bytecode instructions of a step, by variant; they do not depend on the load of the machine.

    A run of ``2 * steps`` less one of ``steps`` leaves out the set-up.
    """
    loaders = [DataLoader(samples(count), batch_size=BATCH, shuffle=True) for count in (steps, 2 * steps)]
    variants: dict[str, Callable[[Any], object]] = {"hand-written": lambda loader: by_hand(nn.Linear(8, 1), loader)}
    for library in ("lockstep", "Lightning"):
        for logged in LOGGED:
            variants[f"{library}, {logged.label}"] = lambda loader, package=LIBRARIES[library], logged=logged: (  # type: ignore[misc]
                with_trainer(package, loader, logged)
            )
        variants[f"{library}, {DEFAULTS}"] = partial(with_defaults, LIBRARIES[library])
    variants[f"Accelerate, {NOTHING.label}"] = with_accelerate
    found = {}
    for name, measure in variants.items():
        measure(loaders[0])  # what is made once for the process is made here
        once, twice = (work_of(partial(measure, loader)) for loader in loaders)
        found[name] = [(more - less) / steps for less, more in zip(once, twice, strict=True)]
    return found


def this_rank(runs: int, steps: int, report: Path) -> None:
    """One of two ranks: the hand-written loop over lockstep's container against Trainer(strategy="ddp")."""
    import torch.distributed as dist

    from lockstep.extensions.parallel.container import DistributedDataParallel

    dist.init_process_group("gloo")
    data = samples(steps, ranks=2)
    own = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    # This thread's CPU time: gloo's own threads take what the traffic on the machine makes them take.
    clock = time.thread_time

    def mean(seconds: float) -> float:
        both = torch.tensor(seconds)
        dist.all_reduce(both)
        return both.item() / 2

    variants = {
        "hand-written": lambda: mean(by_hand(DistributedDataParallel(nn.Linear(8, 1)), own, clock)),
        "lockstep": lambda: mean(with_trainer("lockstep", loader, NOTHING, clock, devices=2, strategy="ddp")),
    }
    figures = interleaved(variants, runs, steps)
    if dist.get_rank() == 0:
        report.write_text(json.dumps(figures))
    dist.destroy_process_group()


def two_processes(runs: int, steps: int) -> dict[str, float]:
    """Starts this script once a rank, as torchrun does."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "ranks.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, __file__, "--this-rank", str(report), "--runs", str(runs), "--steps", str(steps)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        figures: dict[str, float] = json.loads(report.read_text())
    return figures


def fresh(code: str) -> list[float]:
    """The numbers that a new interpreter prints after running ``code``."""
    # with compiled files, as installed packages have them, also where Python is told not to write any
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
    return [float(word) for word in printed.split()]


def import_times(times: int = 10) -> dict[str, float]:
    """CPU seconds that an import adds to ``import torch``: the smallest of ``times`` fresh interpreters."""
    statements = {
        "lockstep": "import lockstep",
        "lockstep, its Trainer": "from lockstep import LightningModule, Trainer",
        "Lightning": "import lightning.pytorch",
        "Accelerate": "import accelerate",
    }
    code = "import time, torch; start = time.process_time(); {}; print(time.process_time() - start)"
    rounds = [{name: fresh(code.format(line))[0] for name, line in statements.items()} for _ in range(times)]
    return {name: min(found[name] for found in rounds) for name in statements}


FIRST_BATCH = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self): return {length}
    def __getitem__(self, index): return torch.tensor([float(index)])

def resident(line):  # "VmRSS" now, "VmHWM" at its peak; Linux tells it in kB
    return next(int(text.split()[1]) / 1024 for text in open("/proc/self/status") if text.startswith(line))

def begin():
    global before, start
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far, that of the imports
    before, start = resident("VmRSS"), time.perf_counter()

def end():
    global seconds, megabytes
    seconds = time.perf_counter() - start
    megabytes = resident("VmHWM") - before

loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
{body}
print(seconds * 1e3, megabytes)
"""
BY_HAND = """
begin()
next(iter(loader))
end()
"""
BY_TRAINER = """
from lockstep import LightningModule, Trainer

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx): return self.layer(batch).mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.0)
    def on_train_epoch_start(self): begin()
    def on_train_batch_start(self, batch, batch_idx): end()

Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False).fit(Module(), loader)
"""


def first_batch() -> dict[str, list[float]]:
    """Milliseconds and megabytes to the first batch of a shuffled epoch: the fastest of five interpreters."""
    codes = {
        "hand-written, 10^7 samples": FIRST_BATCH.format(length=10**7, body=BY_HAND),
        "lockstep, 10^9 samples": FIRST_BATCH.format(length=10**9, body=BY_TRAINER),
    }
    return {name: min(fresh(code) for _ in range(5)) for name, code in codes.items()}


def table(figures: dict[str, Any]) -> str:
    """Everything measured, as Markdown; steps in microseconds over the hand-written loop."""
    one, two = figures["one"], figures["two"]
    base = one["hand-written"]

    def added(name: str) -> str:
        return f"{one[name] - base:+.1f}" if name in one else "–"

    def a_value(library: str, logged: Logged) -> str:
        extra = one[f"{library}, {logged.label}"] - one[f"{library}, {NOTHING.label}"]
        return f"{extra / logged.values:.1f}"

    promised = {NOTHING.label: "≤ 15"}
    extra_instructions = {logged.label: INSTRUCTIONS + logged.values * INSTRUCTIONS_A_VALUE for logged in LOGGED}
    rows = ["| one process, µs a step | hand-written | lockstep | Lightning | Accelerate | promised |"]
    rows += ["|---|---|---|---|---|---|"]
    for logged in LOGGED:
        cells = [added(f"{library}, {logged.label}") for library in LIBRARIES]
        first = f"{base:.1f}" if logged is NOTHING else "–"
        rows.append(f"| {logged.label} | {first} | {' | '.join(cells)} | {promised.get(logged.label, '')} |")
    rows.append(f"| {DEFAULTS} | – | {' | '.join(added(f'{library}, {DEFAULTS}') for library in LIBRARIES)} |  |")
    for logged in LOGGED[2:]:
        cells = [a_value(library, logged) for library in ("lockstep", "Lightning")]
        rows.append(f"| each value of “{logged.label}” | – | {' | '.join(cells)} | – |  |")
    counts = figures["counted"]
    hand = counts["hand-written"]
    rows += ["", "| one process, a step | hand-written | lockstep | Lightning | Accelerate | promised |"]
    rows += ["|---|---|---|---|---|---|"]
    for place, kind in enumerate(("calls of Python functions", "bytecode instructions")):
        for label in (*(logged.label for logged in LOGGED), DEFAULTS):
            names = [f"{library}, {label}" for library in LIBRARIES]
            cells = [f"{counts[name][place] - hand[place]:+,.0f}" if name in counts else "–" for name in names]
            first = f"{hand[place]:,.0f}" if label == NOTHING.label else "–"
            limit = f"≤ {extra_instructions[label]:,}" if place and label in extra_instructions else ""
            rows.append(f"| {kind}, {label} | {first} | {' | '.join(cells)} | {limit} |")
    over = two["lockstep"] - two["hand-written"]
    rows += ["", "| two processes, µs a step | hand-written with lockstep's DDP | Trainer, ddp | promised |"]
    rows += ["|---|---|---|---|", f"| nothing logged | {two['hand-written']:.1f} | {over:+.1f} | ≤ 15 |"]
    rows += ["", "| import, CPU seconds in addition to `import torch` | | promised |", "|---|---|---|"]
    limits = {"lockstep": "≤ 0.15"}
    rows += [f"| {name} | {found:.3f} | {limits.get(name, '')} |" for name, found in figures["imports"].items()]
    rows += ["", "| first batch of a shuffled epoch | ms | peak memory, MB | promised |", "|---|---|---|---|"]
    for name, (milliseconds, megabytes) in figures["first"].items():
        limit = "≤ 50 ms, ≤ 20 MB" if name.startswith("lockstep") else ""
        rows.append(f"| {name} | {milliseconds:.1f} | {megabytes:.1f} | {limit} |")
    return "\n".join(rows)


def draw(one: dict[str, float], path: Path) -> None:
    """Bars of what a step costs more than by hand, on a logarithmic axis."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    colours = {"lockstep": "#1b7837", "Lightning": "#792ee5", "Accelerate": "#e0a000"}
    height = 0.27
    for index, (library, colour) in enumerate(colours.items()):
        found = [
            (place + (index - 1) * height, one[f"{library}, {logged.label}"] - one["hand-written"])
            for place, logged in enumerate(LOGGED)
            if f"{library}, {logged.label}" in one
        ]
        bars = axes.barh([place for place, _ in found], [cost for _, cost in found], height, color=colour)
        bars.set_label(library)
        axes.bar_label(bars, [f"+{cost:.1f}" if cost < 100 else f"+{cost:.0f}" for _, cost in found], padding=3)
    axes.set_yticks(range(len(LOGGED)), [logged.label for logged in LOGGED])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=1)
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("µs of CPU time a step over the hand-written loop (logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def versions() -> str:
    """What the figures were taken with."""
    from importlib.metadata import version

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "accelerate"))
    return f"Python {platform.python_version()}, {packages}, {os.cpu_count()} CPU cores"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure what lockstep, Lightning and Accelerate add to a step.")
    parser.add_argument("--runs", type=int, default=5, help="rounds; each measures every variant once")
    parser.add_argument("--steps", type=int, default=3000, help="training steps of one measurement")
    parser.add_argument("--this-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ["lockstep"] if args.this_rank else LIBRARIES.values():
        importlib.import_module(name)  # Lightning sets its level when it is imported
        logging.getLogger(name).setLevel(logging.ERROR)
    if args.this_rank:
        this_rank(args.runs, args.steps, args.this_rank)
        return

    figures = {
        "one": one_process(args.runs, args.steps),
        "two": two_processes(args.runs, args.steps),
        "counted": counted(),
        "imports": import_times(),
        "first": first_batch(),
    }
    text = table(figures)
    print(text)
    about = f"""# Overhead of a training step

This page shows how much CPU time lockstep, Lightning and Accelerate add to a training step of a hand-written loop.
Written by `python benchmarks/overhead.py --runs {args.runs} --steps {args.steps}`
({versions()}).

{text}

- The model is one linear layer with SGD, batches of {BATCH} from a shuffled `TensorDataset` and one computing thread.
- A number with a sign is the smallest CPU time of {args.runs} runs of {args.steps} steps, minus that of the
  hand-written loop, divided by the number of steps. The runs of all programs are interleaved. Set-up is not included.
  With two processes, the CPU times of the two training threads are averaged.
- Calls and bytecode instructions are counted in the training thread, with tracing on, in a run of its own. They do not
  depend on the load of the machine, as times do: on a shared machine two runs of one commit may differ by 25 µs a step.
- The Trainers run without logger, callbacks, progress bar and checkpoints, except where the table names them.
- Accelerate does not reduce logged values, so it is compared only without logging.
- torch's own shuffle stores every index in memory, so the hand-written loop shuffles a hundredth of the samples.
- "Promised" is the limit that lockstep aims for. For logged values it is a number of bytecode instructions, which a
  daily test checks, since the time of a single value is smaller than the scatter between two runs.

![Overhead of a step over a hand-written loop](overhead.png)
"""
    (DOCS / "overhead.md").write_text(about)
    draw(figures["one"], DOCS / "overhead.png")


if __name__ == "__main__":
    main()
