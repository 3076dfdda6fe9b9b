"""The batch script of a SLURM job that runs ``python train.py`` without ``srun``: srun is started in its place."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import NoReturn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.launch.inherit import started_in
from lockstep.launch.script import command_line

STARTED = "LOCKSTEP_SRUN"
"""The variable with the job in which srun was started so: the tasks have to be known as such."""


def become_srun(environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process by ``srun`` with the same command line, which starts it once for each task of the job.

    The lines of the script before its first Trainer have run once here, and run again in each task. srun takes the
    numbers of nodes and tasks from the job, and all variables of this process reach every task.

    Raises:
        MisconfigurationException: there is no srun, or no script that could be started again.
    """
    import __main__

    job = environ["SLURM_JOB_ID"]
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES", "?"))
    if environ.get(STARTED) == job:
        raise MisconfigurationException(
            f"{STARTED}={job}: srun was started for SLURM job {job}, and this process is still no task of it "
            "(SLURM_STEP_ID is not set): start the script by srun yourself, and remove nothing of SLURM's variables"
        )
    program = shutil.which("srun", path=environ.get("PATH"))
    if program is None:
        raise MisconfigurationException(
            f"this is the batch script of SLURM job {job} with SLURM_NTASKS={tasks}, and srun, which starts its tasks, "
            "is not on PATH: add its folder, or give plugins=LightningEnvironment() for ranks on this node only"
        )
    command = command_line(__main__, sys.argv, sys.orig_argv)
    if command is None:
        raise MisconfigurationException(
            f"this is the batch script of SLURM job {job} with SLURM_NTASKS={tasks}, whose tasks srun starts with the "
            "script that runs here, and there is none: save the code as a file and run that"
        )
    words = arguments(program, command, environ)
    log.info("lockstep: SLURM job %s has %s tasks: starting %s", job, tasks, " ".join(words))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if started_in is not None:
        os.chdir(started_in)
    os.execve(program, words, {**environ, STARTED: job})


def arguments(program: str, command: list[str], environ: Mapping[str, str]) -> list[str]:
    """The words of srun's command.

    Args:
        program: the path of srun.
        command: of a task.
        environ: the environment of the batch script.
    """
    # a task that fails ends the others; and variables such as NCCL_DEBUG reach them under `sbatch --export=NONE`, too
    words = [program, "--kill-on-bad-exit=1", "--export=ALL"]
    if "SLURM_NTASKS" not in environ:
        words += ["--ntasks-per-node=1"]
    if "SLURM_CPUS_PER_TASK" in environ:  # which srun does not take from the job since SLURM 22.05
        words += [f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}"]
    return [*words, *command]
