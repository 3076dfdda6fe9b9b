"""Launcher of ``strategy="ddp"``, which starts the script once for each rank of the node.

In a SLURM batch script, ``srun`` starts the script once for each task.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from lockstep.cluster.detect import LOCAL, detect
from lockstep.cluster.local import is_started, on_one_host, rank_variables
from lockstep.cluster.world import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.launch.environment import SEED, ReservedPort, bind_loader_workers, share_cores, started_in
from lockstep.supervise.mailbox import MAILBOX
from lockstep.supervise.stack import current_stack
from lockstep.supervise.status import calls_before, record_call

if TYPE_CHECKING:
    from lockstep.supervise.client import Side, Supervised

# -- the script, once for each rank --------------------------------------------------------------------------


T = TypeVar("T")

RANK_OF = "LOCKSTEP_RANK_OF"
"""Environment variable with the process that is a rank, and its rendezvous."""

STARTING_CALL = "LOCKSTEP_STARTING_CALL"
"""Environment variable with the line whose call started this rank, if rank 0 had made calls without ranks before."""

VARIABLES = "RANK LOCAL_RANK NODE_RANK GROUP_RANK WORLD_SIZE MASTER_PORT SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK"
"""Environment variables that identify a rank."""


class ScriptLauncher:
    """Launcher that starts the script of this process again for each other rank, and calls functions on all ranks.

    The calling process is local rank 0. Its first `launch` starts the others with the same command line. They run the
    script from the top, reach the same `launch`, detect that they are ranks, and continue together. Later launches,
    of the same Trainer or another, reuse the ranks. A terminal's Ctrl-C reaches each rank by itself. A Ctrl-C that only
    this process received is passed on.

    When a rank fails or diverges, the others end within seconds, and the last line on the terminal is the first cause.

    Args:
        world: world of this process, from `lockstep.cluster.detect.detect`.
        launched: whether the ranks are already running.

    Attributes:
        world: the World of this process, with the port once `launch` calls its function.
    """

    def __init__(self, world: World, launched: bool = False) -> None:
        self.world = world
        self._launched = launched

    def launch(self, function: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Start the node's other ranks if needed, then call ``function(*args, **kwargs)`` here and return its result.

        Raises:
            MisconfigurationException: there is no script that could be started again.
        """
        if not self._launched:
            if self.world.size > 1 and not is_started(os.environ) and not _sides:
                _sides.append(_start_supervisor(self.world))
            self.world = detect(os.environ, self.world.local_size, self.world.num_nodes, LOCAL).world
        check_not_nested(self.world)
        check_first_call()
        share_cores(os.environ, self.world.local_size)
        bind_loader_workers()
        address = os.environ.get(MAILBOX, "")
        if not address and not _sides:
            # a fit without other ranks has no supervisor to load the client of
            from lockstep.supervise.client import at_launcher

            found = at_launcher(self.world)
            _sides.extend([] if found is None else [found])
        with _sides[0].listening() if _sides else nullcontext():
            with record_call(self.world.rank, _sides[0].address if _sides else address, launched=bool(_sides)):
                return function(*args, **kwargs)


def check_not_nested(world: World, environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise an error if this process is a child of a rank, and only inherited the rank's environment variables.

    A script that a rank starts inherits the rank's variables. It would wait for ranks that do not expect it. Without an
    error, record this process' rank for its own child processes.

    Args:
        world: world of this process, if there are other ranks.
        environ: the environment.

    Raises:
        MisconfigurationException: another process already is this rank.
    """
    if world.size == 1:
        return
    rendezvous = f"{world.rank}/{world.size} {world.address}:{world.port}"
    process, _, known = environ.get(RANK_OF, "").partition(" ")
    if known == rendezvous and process != str(os.getpid()):
        there = " ".join(f"-u {name}" for name in VARIABLES.split() if name in environ)
        raise MisconfigurationException(
            f"this process inherited the environment variables of rank {world.rank} of {world.size} at "
            f"{world.address}:{world.port} from process {process}, which is that rank: to start a run inside of a "
            f"rank, remove the variables (env {there} ...) and use devices=1"
        )
    environ[RANK_OF] = f"{os.getpid()} {rendezvous}"


def check_first_call(environ: MutableMapping[str, str] = os.environ) -> None:
    """Raise an error if this rank's first Trainer call is not the call for which rank 0 started this rank.

    The first call of this rank is then one that rank 0 ran alone.

    ``devices="auto"`` on the CPU is one process before ranks exist, and all ranks afterwards. This rank would run the
    script's first call while rank 0 runs a later one.

    Args:
        environ: the environment.

    Raises:
        MisconfigurationException: the calls differ. The message names both lines.
    """
    started, here = environ.pop(STARTING_CALL, None), os.path.normpath(current_stack().location())
    if started is not None and os.path.normpath(started) != here:
        raise MisconfigurationException(
            f"rank 0 started this rank in the call at {started}, but this rank's first call of a Trainer is at "
            f"{here}. Rank 0 ran that call alone. Pass the same devices, num_nodes and strategy to both Trainers, or "
            "use two scripts"
        )


def command_line(main: ModuleType, argv: Sequence[str], original: Sequence[str]) -> list[str] | None:
    """Return the command that runs the script of this process again. Return None if there is no script.

    Args:
        main: the module ``__main__``.
        argv: ``sys.argv``.
        original: ``sys.orig_argv``, all words of the command. The arguments are taken from it where possible, since a
            script may have changed ``sys.argv``.
    """
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if argv[0] in ("", "-"):  # typed in, or read from standard input
        return None
    if argv[0] == "-c":
        at = next((i for i, word in enumerate(original) if i and word[0] == "-" and word[-1] == "c"), None)
        return None if at is None else [*python, "-c", *original[at + 1 :]]
    if spec is not None and spec.name != "__main__":
        return [*python, "-m", spec.name, *_after({spec.name, spec.parent}, argv, original)]
    if spec is not None:  # a folder or an archive with a __main__.py
        return [*python, argv[0], *_after({argv[0]}, argv, original)]
    return None if file is None else [*python, os.path.abspath(file), *_after({argv[0]}, argv, original)]


def _after(names: set[str], argv: Sequence[str], original: Sequence[str]) -> Sequence[str]:
    """Return the script's arguments: the words that follow the script's name in a command line."""
    at = next((i for i, word in enumerate(original) if i and word in names), None)
    return argv[1:] if at is None else original[at + 1 :]


_sides: list[Side] = []
"""This process' connection to its supervisor. The list has one entry or none."""

_reserved_ports: list[ReservedPort] = []
"""The reserved port of the rendezvous, if this process chose it."""


def _start_supervisor(world: World) -> Supervised:
    """Start the supervisor of this node, which then starts the other ranks."""
    import __main__

    command = command_line(__main__, sys.argv, sys.orig_argv) if world.local_size > 1 else []
    if command is None:
        raise MisconfigurationException(
            "strategy='ddp' starts the script once for each device, and an interactive session has no script: use "
            "strategy='ddp_notebook', strategy='fsdp' or a strategy's start_method='spawn', or run the code as a file"
        )
    if not world.port:
        # reserved until this process ends: other ranks connect at any time
        _reserved_ports.append(ReservedPort())
        world = replace(world, port=_reserved_ports[0].number)
    if world.local_size > 1:
        os.environ.update(rank_variables(world))
        if world.num_nodes == 1:
            os.environ.update(on_one_host(world.address, os.environ))
    environ = dict(os.environ)
    from lockstep.ground.seed import current_seed  # imports torch

    if current_seed() is not None:
        environ[SEED] = str(current_seed())
    from lockstep.supervise.client import Supervised  # as above

    if calls_before():
        environ[STARTING_CALL] = current_stack().location()
    return Supervised(world, command, environ)


def side() -> Side | None:
    """Return this process' connection to its supervisor. Return None if there is none.

    Ranks that the supervisor itself started have no connection.
    """
    return _sides[0] if _sides else None


# -- tasks of a SLURM job, by srun ---------------------------------------------------------------------------


STARTED = "LOCKSTEP_SRUN"
"""Environment variable with the job in which srun was started this way. It detects tasks that are not recognized."""


def become_srun(environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process with ``srun``, which runs the same command line once for each task of the SLURM job.

    The lines of the script before its first Trainer have run once here, and run again in each task. srun takes the
    numbers of nodes and tasks from the job. All environment variables of this process reach every task.

    Raises:
        MisconfigurationException: there is no srun, or no script that could be started again.
    """
    import __main__

    job = environ["SLURM_JOB_ID"]
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES", "?"))
    if environ.get(STARTED) == job:
        raise MisconfigurationException(
            f"{STARTED}={job}: srun was started for SLURM job {job}, but this process is not one of its tasks "
            "(SLURM_STEP_ID is not set): start the script with srun yourself, and keep all of SLURM's variables"
        )
    program = shutil.which("srun", path=environ.get("PATH"))
    if program is None:
        raise MisconfigurationException(
            f"SLURM job {job} has SLURM_NTASKS={tasks}, but srun, which starts the tasks, is not on PATH: add its "
            "folder to PATH, or use plugins=LightningEnvironment() for ranks on this node only"
        )
    command = command_line(__main__, sys.argv, sys.orig_argv)
    if command is None:
        raise MisconfigurationException(
            f"SLURM job {job} has SLURM_NTASKS={tasks}, but there is no script that srun could start for each task: "
            "save the code as a file and run it"
        )
    words = arguments(program, command, environ)
    log.info("lockstep: SLURM job %s has %s tasks: starting %s", job, tasks, " ".join(words))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if started_in is not None:
        os.chdir(started_in)
    os.execve(program, words, {**environ, STARTED: job})


def arguments(program: str, command: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command line with which srun runs ``command`` in each task.

    Args:
        program: path of srun.
        command: command of a task.
        environ: environment of the batch script.
    """
    # a failed task ends the others; variables such as NCCL_DEBUG reach tasks even under `sbatch --export=NONE`
    words = [program, "--kill-on-bad-exit=1", "--export=ALL"]
    if "SLURM_NTASKS" not in environ:
        words += ["--ntasks-per-node=1"]
    # srun does not take it from the job since SLURM 22.05
    if "SLURM_CPUS_PER_TASK" in environ:
        words += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    return [*words, *command]
