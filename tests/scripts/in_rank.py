"""Runs a script on ranks of the pool, which have imported torch already, as a fresh process of each would run it.

Each rank forks a process that gets the script's arguments, folder, environment and output, runs it as ``__main__``, and
ends as an interpreter ends. It costs a tenth of a second where a fresh process takes over two to import torch; what
depends on a fresh process (imports, how lockstep starts others) is not for it. Where the suite has a device, it is one.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

from lockstep.testing.devices import chosen_accelerator
from tests.tools.pool import RankPool, launcher_environment

LAUNCHERS = tuple(launcher_environment(0, 1, 0, ""))
"""The variables of a launcher, which the pool sets for its ranks."""


def run_script(
    ranks: RankPool,
    script: Path,
    *words: str,
    folder: Path,
    world: int = 1,
    launched: bool = False,
    environ: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    timeout: float = 60,
) -> list[CompletedProcess[str]]:
    """How the script ended on each rank, and what it printed there.

    Args:
        ranks: the pool.
        script: its path.
        words: its arguments.
        folder: the working directory.
        world: on how many ranks it is started, at the same time.
        launched: whether it finds the variables of a launcher (torchrun's); by itself if not.
        environ: variables on top; or those of each rank.
        timeout: seconds, for all of it.
    """
    each = [environ] * world if isinstance(environ, Mapping) else [*environ] or [{}] * world
    with tempfile.TemporaryDirectory(prefix="lockstep-script-") as said:
        command = [str(script), *words]
        codes = ranks(world).run(_attend, command, str(folder), launched, each, said, timeout=timeout, group=False)
        texts = [[(Path(said) / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in range(world)]
    return [CompletedProcess(command, code, *text) for code, text in zip(codes, texts, strict=True)]


def _attend(command: list[str], folder: str, launched: bool, environ: Sequence[Mapping[str, str]], said: str) -> int:
    """Forks the process of this rank and waits for it: its exit status, negative for a signal."""
    rank = int(os.environ["RANK"])
    if chosen_accelerator() != "cpu":  # a fork of a rank that has used a device cannot use it
        variables = {name: value for name, value in os.environ.items() if launched or name not in LAUNCHERS}
        with open(f"{said}/out-{rank}", "ab") as out, open(f"{said}/err-{rank}", "ab") as err:
            return subprocess.run(
                [sys.executable, *command], cwd=folder, env={**variables, **environ[rank]}, stdout=out, stderr=err
            ).returncode
    pid = os.fork()
    if not pid:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{said}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if not launched:
            for name in LAUNCHERS:
                os.environ.pop(name, None)
        os.environ.update(environ[rank])
        os.chdir(folder)
        _run(command)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run(command: list[str]) -> NoReturn:
    code = 1
    try:
        sys.argv, sys.orig_argv = command, [sys.executable, *command]
        sys.path.insert(0, os.path.dirname(command[0]))
        sys.excepthook = sys.__excepthook__  # torch wraps it once for each group that the rank was in
        try:
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
