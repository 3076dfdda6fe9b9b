"""The command ``lockstep bisect``, which finds the step and the operation in which two versions of a run part."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.run import CommandParser, number_from
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    import numpy as np

    from lockstep.extensions.replay.parting import Parting
    from lockstep.extensions.replay.request import ReplayRequest, Script
    from lockstep.extensions.replay.run_checkpoints import SavedRun

USAGE = """lockstep bisect A B
       lockstep bisect [--commit REVISION] [--python PYTHON] [--steps K] -- script.py arguments"""
ABOUT = """\
Find the first step in which two runs part, and in it the first operation: its name, its module, the line of the script,
and by how much.
A and B are the folders of two runs with Trainer(record="hashes"). Or compare a script with itself at another commit, or
under another Python with other packages; both start from the beginning, on one process.
"""
EXAMPLES = """\
exit codes: 0 no difference, 1 they part, 2 unknown

examples:
  lockstep bisect runs/monday runs/tuesday
  lockstep bisect --commit v1.2 -- train.py --lr 0.1
  lockstep bisect --python ~/torch-2.14/bin/python --steps 50 -- train.py
"""


@dataclass(frozen=True)
class Version:
    """One of the two versions that are compared.

    Attributes:
        name: "A" or "B".
        script: its script.
        checkpoint: checkpoint to start from; "" for the start.
        threads: number of threads for torch's operations; 0 for torch's default.
    """

    name: str
    script: Script
    checkpoint: str = ""
    threads: int = 0

    def run(self, request: ReplayRequest) -> str:
        """Run the version as requested, on one process, and return the version of torch that it runs with."""
        request = replace(request, checkpoint=self.checkpoint, threads=self.threads)
        return self.script.run(request, f"lockstep bisect: {self.name}")[0].torch


def bisect(words: Sequence[str]) -> int:
    """Find where two versions of a run part, print it, and return the exit code.

    Args:
        words: arguments of the command.

    Raises:
        MisconfigurationException: an option is wrong, or a version cannot be run again.
    """
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    options, script = _parser().parse_args(words[:at]), words[at + 1 :]
    if script and options.runs:
        raise MisconfigurationException("lockstep bisect: pass two runs, or a script after --, but not both")
    if script and not (options.commit or options.python):
        raise MisconfigurationException("lockstep bisect -- SCRIPT: add --commit or --python, for the other version")
    if not script and len(options.runs) != 2:
        raise MisconfigurationException("lockstep bisect: pass the folders of two runs, or a script after --")
    with tempfile.TemporaryDirectory(prefix="lockstep-bisect-") as folder:
        if script:
            versions, parted = _of_script(script, options.commit, options.python, options.steps, Path(folder))
        else:
            versions, parted = _of_runs(options.runs, Path(folder))
        if parted is None:
            print("A and B do not part: gradients and weights of all common steps are the same.")
            return 0
        step, what = parted
        print(f"A and B part in step {step}: its {what} differ.", flush=True)
        parting, note = _trace(versions, step, Path(folder))
    print(note if parting is None else f"{note}{parting}")
    return 2 if parting is None else 1


def _of_runs(runs: Sequence[str], folder: Path) -> tuple[list[Version], tuple[int, str] | None]:
    """Return the versions of two recorded runs, and (step, field) where their recordings part."""
    from lockstep.extensions.replay.parting import first_step
    from lockstep.extensions.replay.recording import FILE, read
    from lockstep.extensions.replay.request import Script
    from lockstep.extensions.replay.run_checkpoints import find

    recordings = [read(run, below=True) for run in runs]
    for run, recording in zip(runs, recordings, strict=True):
        if not len(recording):
            raise MisconfigurationException(
                f'lockstep bisect {run}: there is no recording ({FILE}) in it. Train with Trainer(record="hashes")'
            )
    parted = first_step(*recordings)
    if parted is None:
        return [], None
    versions = []
    for name, run in zip("AB", runs, strict=True):
        saved = find(run, parted[0], or_start=True)
        home = _home_of(saved, folder / f"code-{name}", name)
        started = saved.started
        known = started.get("executable", "")
        python = known if os.path.exists(known) else sys.executable
        script = Script(saved.command([]), home, started.get("variables", {}), python)
        path = os.path.abspath(saved.path) if saved.path else ""
        versions.append(Version(name, script, path, started.get("threads", 0)))
    return versions, parted


def _home_of(saved: SavedRun, folder: Path, name: str) -> str:
    """Return a folder with the code of a run: where it was started, or its commit.

    Raises:
        MisconfigurationException: neither has the code of the run.
    """
    home, commit = saved.started.get("folder", "."), saved.started.get("commit", "")
    differ = saved.changed_code(home)
    if not differ:
        return str(home)
    if commit:
        found = checkout(home, commit, folder)
        if not saved.changed_code(found):
            return found
    raise MisconfigurationException(
        f"lockstep bisect: the code of {name} is no longer in {home}: {', '.join(differ)} changed"
        + (f", and is not that of commit {commit[:12]}" if commit else "")
        + ". Check out the code of the run there"
    )


def checkout(home: str, revision: str, folder: Path) -> str:
    """Write the files of a git revision to a new folder, and return the folder there that corresponds to ``home``.

    Args:
        home: a folder in a git repository.
        revision: name of a commit.
        folder: folder to make.

    Raises:
        MisconfigurationException: there is no repository or no such revision.
    """
    archive = subprocess.run(["git", "-C", home, "archive", "--format=tar", f"{revision}:./"], capture_output=True)
    if archive.returncode:
        raise MisconfigurationException(f"lockstep bisect: {home} at {revision!r}: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return str(folder)


def _of_script(
    script: Sequence[str], commit: str, python: str, steps: int, folder: Path
) -> tuple[list[Version], tuple[int, str] | None]:
    """Return the two versions of a script, and (step, field) where they part in its first ``steps`` steps."""
    from lockstep.extensions.replay.parting import first_step
    from lockstep.extensions.replay.recording import read
    from lockstep.extensions.replay.request import ReplayRequest, Script

    here = os.getcwd()
    there = checkout(here, commit, folder / "code-B") if commit else here
    other = os.path.abspath(os.path.expanduser(python)) if python else sys.executable
    versions = [Version("A", Script(script, here)), Version("B", Script(script, there, python=other))]

    def recorded(version: Version) -> np.ndarray:
        own = str(folder / f"hashes-{version.name}")
        version.run(ReplayRequest(own, "", steps - 1, steps - 1, kind="hashes"))
        return read(own)

    with ThreadPoolExecutor() as both:
        recordings = [*both.map(recorded, versions)]
    if not all(map(len, recordings)):
        raise MisconfigurationException("lockstep bisect: the script has trained no step")
    print(f"compared: {min(map(len, recordings))} steps", flush=True)
    return versions, first_step(*recordings)


def _trace(versions: Sequence[Version], step: int, folder: Path) -> tuple[Parting | None, str]:
    """Run both versions up to a step, and return (where its operations part, a note to print before it)."""
    from lockstep.extensions.replay.operations import Trace
    from lockstep.extensions.replay.parting import first_change, first_operation
    from lockstep.extensions.replay.request import ReplayRequest

    def traced(version: Version, name: str, nudge: float = 0.0) -> tuple[Trace, str]:
        request = ReplayRequest(str(folder / name), "", step, step, kind="operations", nudge=nudge)
        torch = version.run(request)
        return Trace.read(request.folder), torch

    first, other = versions
    with ThreadPoolExecutor() as both:
        (a, torch_a), (b, torch_b) = both.map(traced, (first, other), ("trace-A", "trace-B"))
        repeating = both.submit(traced, first, "trace-repeat")
        nudging = both.submit(traced, first, "trace-nudged", 2.0**-23) if torch_a != torch_b else None
    unstable = first_operation(a, repeating.result()[0])
    if unstable is not None:
        return None, f"A does not repeat itself, so B cannot be compared with it. Two repeats of A part in {unstable}"
    if nudging is None:
        parting, note = first_operation(a, b), "First operation: "
    else:
        parting, note = first_change(a, b, nudging.result()[0]), f"torch {torch_a} and {torch_b}: "
        if parting is not None and parting.is_rounding:
            note += "rounding only. It starts in "
    if parting is None:
        return None, (
            "Replayed on one process, its operations give the same results: the difference comes from a reduction "
            "between ranks, or from state that checkpoints do not contain."
        )
    return parting, note


def _parser() -> CommandParser:
    parser = CommandParser("lockstep bisect", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help='folders of two runs with Trainer(record="hashes")')
    add("--commit", default="", metavar="REVISION", help="compare with the script at a git revision")
    add("--python", default="", metavar="PYTHON", help="compare with the script under another interpreter")
    add("--steps", type=number_from(1), default=20, metavar="K", help="steps of a script to compare (default: 20)")
    return parser
