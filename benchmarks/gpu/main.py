"""Runs the parts of `scripts/gpu`, each in a process with a limit of its own, and keeps what they found.

    scripts/gpu --out DIR                       # all parts, on one CUDA device or several, within 585 seconds
    scripts/gpu --out DIR --parts waits,speed   # these alone
    scripts/gpu --out DIR --device cpu --small  # a trial of the script itself, on a machine without a device
    scripts/gpu --write-tables --out DIR        # DIR/gpu.json of whichever machine becomes docs/gpu.md and README rows

Parts that measure no time run side by side where there are cores for it. It needs torch and what lockstep requires, and
installs nothing. DIR gets gpu.json (everything found), gpu.md (the tables) and gpu.log (what the parts printed). A part
that fails, or takes longer than its limit, stops no other. The last line is ``GPU: n parts passed, m failed``; the exit
status is 1 where one failed, 2 where none could begin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import plan, report
from benchmarks.gpu.plan import ROOT, PartPlan

GRACE = 3.0
"""Seconds beyond its limit in which a part may end by itself; its own watchdog prints all stacks at the limit."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = parsed(arguments)
    out: Path = args.out.resolve()
    if args.write_tables:
        return report.write_tables(out, args.commit)
    try:
        parts = plan.chosen(args.parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "gpu.log", "a" if args.add else "w") as log:
        found = {
            "format": report.FORMAT,
            "command": command_line(args),
            "began": time.strftime(report.TIME, time.gmtime()),
        }
        found |= surroundings(args, log)
        if found["devices"] == 0:
            print(f"torch finds no {args.device} device here; --device cpu --small is a trial of this script")
            return 2
        return run(args, parts, found, out, log)


def run(args: argparse.Namespace, parts: list[PartPlan], found: dict[str, Any], out: Path, log: IO[str]) -> int:
    """All parts, one after another or several at once; what is found is kept after each."""
    end = time.monotonic() + args.seconds
    found["parts"] = report.earlier_parts(out, found) if args.add else {}
    keeping = threading.Lock()

    def one(part: PartPlan, limit: float) -> None:
        with tempfile.TemporaryFile("w+") as own:
            told = one_part(part, limit, args, own) if limit > 1 else report.not_begun(part)
            with keeping:
                own.seek(0)
                shutil.copyfileobj(own, log)
                found["parts"][part.name] = told
                (out / "gpu.json").write_text(json.dumps(found, indent=1))
                (out / "gpu.md").write_text(report.tables(found))
                print(report.line_of(part, told), flush=True)

    left = list(parts)
    for together in plan.rounds(parts, len(os.sched_getaffinity(0))):
        left = left[len(together) :]
        limits = [plan.limit_of(part, left, end - time.monotonic()) for part in together]
        with ThreadPoolExecutor(len(together)) as threads:
            list(threads.map(one, together, limits))
    print(report.last_line(found))
    return 1 if report.failed(found) else 0


def one_part(part: PartPlan, limit: float, args: argparse.Namespace, log: IO[str]) -> dict[str, Any]:
    """What a part found, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        kept = Path(folder) / "checks.jsonl"
        settings = {
            "part": part.name,
            "device": args.device,
            "small": args.small,
            "limit": limit,
            "kept": str(kept),
            "without": args.without,
        }
        begun = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu.process", json.dumps(settings)]
        status = in_process(command, limit + GRACE, f"part {part.name}", log, folder)
        lines = kept.read_text().splitlines() if kept.exists() else []
        checks = [json.loads(line) for line in lines]
    return report.part_result(checks, status, limit, time.monotonic() - begun)


def in_process(command: list[str], limit: float, name: str, log: IO[str], folder: str) -> int | None:
    """The exit status of a command whose output goes to the log; None where it was ended at its limit."""
    log.write(f"===== {name}, at most {limit:.0f} s\n")
    log.flush()
    begun = time.monotonic()
    with own_session(command, log, folder) as process:
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
    log.write(f"===== {name}: exit status {status} after {time.monotonic() - begun:.1f} s\n")
    log.flush()
    return status


@contextlib.contextmanager
def own_session(command: list[str], log: IO[str], folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, working in a scratch folder; whatever is left of it is ended."""
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=environment(folder),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def environment(folder: str) -> dict[str, str]:
    """The variables of a part: this checkout is what it imports, without being installed.

    Args:
        folder: of the part. It gets a package ``tests`` that stands for this checkout's: some other package that is
            installed may have brought one of that name.
    """
    standing_in = Path(folder) / "imports" / "tests"
    standing_in.mkdir(parents=True, exist_ok=True)
    (standing_in / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'tests')!r}]\n")
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    path = os.pathsep.join([str(standing_in.parent), str(ROOT / "src"), str(ROOT), *before])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def surroundings(args: argparse.Namespace, log: IO[str]) -> dict[str, Any]:
    """Versions, devices and the commit, asked of a process: this one makes no context on a device."""
    command = [sys.executable, "-m", "benchmarks.gpu.surroundings", args.device]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment(folder), stdout=subprocess.PIPE, stderr=log, text=True)
    if done.returncode:
        return {"devices": 0}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "small": args.small}


def command_line(args: argparse.Namespace) -> str:
    """The command without the folder, for the page."""
    words = ["scripts/gpu", f"--seconds {args.seconds:g}"]
    words += [f"--device {args.device}"] if args.device != "cuda" else []
    words += [f"--parts {args.parts}"] if args.parts else []
    words += ["--small"] if args.small else []
    words += [f"--without {','.join(args.without)}"] if args.without else []
    return " ".join(words)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, read."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="Try and measure lockstep on a device.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json, gpu.md and gpu.log")
    parser.add_argument("--seconds", type=float, default=plan.WHOLE, help="for all parts together")
    parser.add_argument("--device", default="cuda", help='"cuda", "cpu", or another device type of torch')
    parser.add_argument("--parts", default="", help=", ".join(part.name for part in plan.PARTS))
    parser.add_argument("--small", action="store_true", help="small models and few steps: to try the script")
    parser.add_argument("--add", action="store_true", help="keep other parts of an earlier run on this device")
    parser.add_argument("--without", default="", help="libraries not to compare with: lightning, accelerate")
    parser.add_argument("--write-tables", action="store_true", help="run nothing: write docs/gpu.md and README rows")
    parser.add_argument("--commit", default="", help="of the checkout that ran, where it had no git")
    args = parser.parse_args(arguments)
    args.without = [name for name in args.without.split(",") if name]
    return args
