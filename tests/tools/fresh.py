"""Fresh Python processes, to their end: one that takes too long is killed with all that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import lockstep
from tests.launch.sessions import kill

PYTHONPATH = os.pathsep.join(
    [
        str(Path(lockstep.__file__).parents[1]),
        str(Path(__file__).parents[2]),
        *filter(None, [os.environ.get("PYTHONPATH")]),  # by which a process has the suite's device
    ]
)
"""By which a process imports lockstep from where this one has it, and modules of tests."""


def python(
    *words: str | Path, folder: Path | None = None, seconds: float = 100.0, **variables: str
) -> CompletedProcess[str]:
    """How a fresh interpreter with one thread ends that gets these words, and what it writes.

    Args:
        *words: the command line, without the interpreter.
        folder: where it works.
        seconds: after them it is killed.
        **variables: of the environment, on top.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return ended([sys.executable, *words], folder, seconds, environ)


def ended(
    command: Sequence[str | Path], folder: Path | None, seconds: float, environ: dict[str, str]
) -> CompletedProcess[str]:
    """The same of any command, in a session of its own.

    Raises:
        TimeoutError: it was still there. It has what the command had written.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        late = False
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            kill(process.pid)
            out, err = process.communicate()
            late = True
        finally:
            kill(process.pid)
    if late:
        raise TimeoutError(f"{' '.join(map(str, command))} took more than {seconds:g} s:\n{out}\n{err}")
    return CompletedProcess(command, process.returncode, out, err)
