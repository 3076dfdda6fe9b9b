"""How ranks begin and end: each way to start them, signals while the device works, a rank asleep, lack of memory."""

from __future__ import annotations

import importlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.devices import accelerator_of
from benchmarks.gpu.modules import QUIET, Classifier, perceptron, rows

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "ranks.py"
THERE = "is there"
START = 40.0
"""Seconds until ranks have to be there."""
END = 10.0
"""Seconds in which everything has to be over behind a signal."""
BUSY = 4.0
"""Seconds that the device works when a run is to end in order, as on SIGTERM."""
PATIENCE = 2.0
"""Seconds beyond ``hang_timeout`` in which a rank has to be named."""


def run(part: Part) -> None:
    """Scripts first, which show how a user would see it; then what is looked at in this process."""
    if not (part.is_cuda or part.on_cpu):
        part.check("scripts with two ranks on one device", _left_out, part)
    else:
        for strategy in ("ddp", "ddp_spawn", "ddp_fork"):
            part.check(f"{strategy}: starts and ends", started, part, strategy)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            part.check(f"{number.name} while a rank waits for the device", signalled, part, number)
        part.check("a rank that is asleep is named", asleep, part)
        part.check("lack of memory is reported", lacking, part)
    part.check("PyTorchProfiler", profiled, part)
    part.check("DeviceStatsMonitor", observed, part)
    if importlib.import_module("lockstep.ground.extensions").is_there("extras"):
        part.check("ThroughputMonitor", counted, part)


def _left_out(part: Part) -> Numbers:
    raise Skip(f"lockstep.testing.SharedCard is for CUDA devices, not for {part.device}")


# -- scripts ---------------------------------------------------------------------------------------------------


class Script:
    """A run of the script, whose lines are read as they come; at the end of the block nothing of it is left."""

    def __init__(self, part: Part, *arguments: str) -> None:
        command = [sys.executable, str(SCRIPT), *arguments, "--device", part.device]
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def until(self, pattern: str, limit: float, times: int = 1) -> float | None:
        """Seconds until so many lines have the pattern; None where they do not come."""
        begun, seen = time.monotonic(), 0
        while seen < times:
            try:
                line = self._queue.get(timeout=max(0.01, begun + limit - time.monotonic()))
            except queue.Empty:
                return None
            if line is None:
                return None
            self.lines.append(line)
            print(f"  {line}", flush=True)
            seen += re.search(pattern, line) is not None
        return time.monotonic() - begun

    def ended(self, limit: float) -> float | None:
        """Seconds until the process is over and nothing holds its output any more."""
        begun = time.monotonic()
        self.until("^$never", limit)
        self._reader.join(max(0.01, begun + limit - time.monotonic()))
        try:
            self.process.wait(max(0.01, begun + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        return None if self._reader.is_alive() else time.monotonic() - begun

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *error: object) -> None:
        for process in descendants(self.process.pid):
            with _gone():
                os.kill(process, signal.SIGKILL)
        self.process.wait()


class _gone:
    """What has ended by itself needs no signal."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return isinstance(error, ProcessLookupError)


def descendants(root: int) -> list[int]:
    """A process and all that came of it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found = [root]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[::-1]


def started(part: Part, strategy: str) -> Numbers:
    """Two ranks train some steps."""
    with Script(part, "start", "--strategy", strategy) as script:
        there = script.until(THERE, START, times=2)
        over = script.ended(START)
        code = script.process.returncode
    numbers: Numbers = {"seconds until both train": there and round(there, 2), "status": code}
    expect(over is not None and code == 0, said(script.lines) or "it did not end", numbers)
    expect(there is not None and "all done" in script.lines, said(script.lines), numbers)
    return numbers


def signalled(part: Part, number: signal.Signals) -> Numbers:
    """Everything is over within some seconds; a killed rank is named, and a second Ctrl-C waits for nothing."""
    seconds = BUSY if number is signal.SIGTERM else 60.0
    with Script(part, "busy", "--seconds", f"{seconds:g}") as script:
        expect(script.until(THERE, START, times=2) is not None, said(script.lines))
        ranks = [process for process in descendants(script.process.pid) if process != script.process.pid]
        if number is signal.SIGKILL:
            os.kill(newest(ranks), number)
        else:
            os.killpg(script.process.pid, number)
        if number is signal.SIGINT:
            expect(script.until("second Ctrl-C", END) is not None, "the first Ctrl-C was not told")
            os.killpg(script.process.pid, number)
        most = END + (BUSY if number is signal.SIGTERM else 0)
        over = script.ended(most + 3)
        code = script.process.returncode
    numbers: Numbers = {"seconds": over and round(over, 2), "status": code, "last line": said(script.lines)}
    expect(over is not None and over <= most, "it is not over in time", numbers)
    if number is signal.SIGKILL:
        expect(any("SIGKILL" in line for line in script.lines), "the killed rank is not named", numbers)
    return numbers


def newest(processes: Sequence[int]) -> int:
    """That of a rank, by its command: the newest of those that run the script."""
    running = [each for each in processes if SCRIPT.name in Path(f"/proc/{each}/cmdline").read_text()]
    expect(bool(running), "no process of a rank was found")
    return max(running)


def asleep(part: Part, *more: str) -> Numbers:
    """One rank sleeps while the other reads a value of the device: it is named."""
    timeout = 3.0
    with Script(part, "asleep", "--timeout", f"{timeout:g}", *more) as script:
        expect(script.until(THERE, START, times=2) is not None, said(script.lines))
        took = script.until(r"rank 1\b", timeout + PATIENCE + 10)
    numbers: Numbers = {"seconds": took and round(took, 2), "hang_timeout": timeout, "said": said(script.lines)}
    expect(took is not None, "the rank was not named", numbers)
    expect(took is not None and took <= timeout + PATIENCE + 1, "it was named late", numbers)
    return numbers


def lacking(part: Part) -> Numbers:
    """The message names what memory is used for."""
    if part.on_cpu:
        raise Skip("a CPU gives memory that it does not have")
    with Script(part, "memory", "--devices", "1") as script:
        over = script.ended(START)
    numbers: Numbers = {"seconds": over and round(over, 2), "said": said(script.lines)}
    expect(
        any("memory" in line and "parameters" in line for line in [" ".join(script.lines)]), "no word of it", numbers
    )
    return numbers


def said(lines: Sequence[str]) -> str:
    """The last line with something in it."""
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


# -- in this process -------------------------------------------------------------------------------------------


def fit(part: Part, steps: int, **flags: Any) -> Any:
    """A short fit."""
    from lockstep import Trainer

    own = {**QUIET, "accelerator": accelerator_of(part.device), "devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
    trainer = Trainer(**{**own, "limit_val_batches": 0, **flags})
    trainer.fit(Classifier(perceptron(), metric=False), rows(4 * steps, 4))
    return trainer


def profiled(part: Part) -> Numbers:
    """A profile of some steps names the device's kernels."""
    profilers: Any = importlib.import_module("lockstep.profilers")
    profiler = profilers.PyTorchProfiler(dirpath="profiles", filename="one")
    fit(part, 6, profiler=profiler)
    files = [file for file in Path("profiles").rglob("*") if file.is_file()]
    expect(bool(files), "no file was written")
    return {"files": len(files), "bytes": sum(file.stat().st_size for file in files)}


def logged(folder: str) -> Any:
    """A logger of rows."""
    loggers: Any = importlib.import_module("lockstep.loggers")
    return loggers.CSVLogger(folder)


def columns(folder: str) -> list[str]:
    """The names in what it wrote."""
    files = list(Path(folder).rglob("metrics.csv"))
    expect(bool(files), "no metrics.csv was written")
    return files[0].read_text().splitlines()[0].split(",")


def observed(part: Part) -> Numbers:
    """What the device has to tell is written."""
    if part.on_cpu and find_spec("psutil") is None:
        raise Skip("psutil is not installed")
    callbacks: Any = importlib.import_module("lockstep.callbacks")
    fit(part, 6, logger=logged("stats"), callbacks=callbacks.DeviceStatsMonitor())
    names = [name for name in columns("stats") if name.startswith("DeviceStatsMonitor")]
    expect(bool(names), "nothing of the device was written")
    return {"names": len(names)}


def counted(part: Part) -> Numbers:
    """Batches a second, and the share of the device's peak."""
    callbacks: Any = importlib.import_module("lockstep.callbacks")
    monitor = callbacks.ThroughputMonitor(batch_size_fn=size_of, window_size=3)
    fit(part, 8, logger=logged("throughput"), callbacks=monitor)
    names = [name for name in columns("throughput") if name.startswith("train/")]
    expect(bool(names), "no throughput was written")
    return {"names": len(names), "operations a second at most": monitor.available_flops}


def size_of(batch: Any) -> int:
    """Samples."""
    return len(batch[0])
