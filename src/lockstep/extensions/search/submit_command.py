"""``lockstep submit``: submits a script to SLURM as a job that is saved and requeued at its time limit."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lockstep.cli.run import CommandParser, check_script, number_from, split, words_of
from lockstep.extensions.search import queue, sbatch
from lockstep.extensions.search.sbatch import Batch
from lockstep.ground.errors import MisconfigurationException

USAGE = "lockstep submit [options] script.py [options] [arguments of the script]"
ABOUT = """\
Submit a script to SLURM: srun starts it once for each task, and its Trainer finds the ranks there.

The Trainer saves a job that nears its time limit or is preempted. The job is requeued, also when a node is lost, and
resumes from its checkpoint. Options can be given before the script and directly after it. From the first word that is
not an option of this command, or from --, all words are arguments of the script.
"""
EXAMPLES = """\
examples:
  lockstep submit train.py --nodes 2 --gpus-per-node 8 --time 2:00:00 --lr 0.1
  lockstep submit --print train.py                            show the batch script, and submit nothing
  lockstep submit --sbatch partition=long --sbatch exclusive -m project.train
"""


def submit(words: Sequence[str]) -> int:
    """Run ``lockstep submit`` and return its exit code.

    Args:
        words: arguments after ``lockstep submit``.

    Raises:
        MisconfigurationException: an option is invalid.
    """
    options, script = split(list(words), _parser())
    check_script("lockstep submit", options.module, script)
    text = sbatch.text(_batch(options, script))
    if options.print:
        print(text, end="")
        return 0
    try:
        job = queue.submit(text=text)
    except queue.SlurmRefused as refused:
        print(f"lockstep submit: {refused}", file=sys.stderr)
        return 1
    print(f"submitted: job {job}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("lockstep submit", USAGE, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="run a module in place of a script, as `python -m` does")
    add("--print", action="store_true", help="show the batch script, and submit nothing")
    add("--nodes", type=number_from(1), default=1, metavar="N", help="number of nodes (default: 1)")
    add("--gpus-per-node", type=number_from(0), default=0, metavar="N", help="GPUs of a node, which has as many tasks "
        "(default: none)")  # fmt: skip
    add("--gpu-type", metavar="NAME", help="type of GPU, by the cluster's name for it")
    add("--tasks-per-node", type=number_from(1), metavar="N", help="tasks on a node (default: its GPUs, or one)")
    add("--cpus-per-task", type=number_from(1), metavar="N", help="CPUs of a task")
    add("--mem", type=number_from(1), metavar="MIB", help="memory of a node in MiB")
    add("--time", metavar="LIMIT", help="the time limit: 2:00:00, 1-12, or minutes")
    add("--save-before", type=number_from(0), default=5, metavar="MIN", help="minutes before that limit at which the "
        "run is saved and requeued; 0 disables it (default: 5)")  # fmt: skip
    add("--partition", metavar="NAME", help="partition of the cluster")
    add("--job-name", metavar="NAME", help="name that squeue shows (default: the script's name)")
    add("--output", metavar="FILE", help="file for the output of the job (default: slurm-%%j.out)")
    add("--module", dest="modules", action="append", default=[], metavar="NAME", help="load an environment module; "
        "may be given several times")  # fmt: skip
    add("--command", dest="commands", action="append", default=[], metavar="LINE", help="a line of shell that runs "
        "before the script; may be given several times")  # fmt: skip
    add("--sbatch", action="append", default=[], metavar="NAME[=VALUE]", help="any other option of sbatch; may be "
        "given several times")  # fmt: skip
    add("--python", default=sys.executable, metavar="PROGRAM", help="Python that the job runs (default: this one)")
    return parser


def _batch(options: argparse.Namespace, script: list[str]) -> Batch:
    tasks = options.tasks_per_node or options.gpus_per_node or 1
    if options.gpus_per_node and tasks != options.gpus_per_node:
        raise MisconfigurationException(
            f"--tasks-per-node {tasks} contradicts --gpus-per-node {options.gpus_per_node}, because each task "
            "uses one GPU. Remove --tasks-per-node"
        )
    parts = [each.partition("=") for each in options.sbatch]
    more = [sbatch.option(name, value if equals else None) for name, equals, value in parts]
    if options.partition is not None:
        more.append(sbatch.option("partition", options.partition))
    name = options.module or os.path.basename(os.path.normpath(script[0])).removesuffix(".py")
    return Batch(
        name=options.job_name or name,
        command=[options.python, *words_of(options.module, script)],
        folder=os.getcwd(),
        output=options.output or "slurm-%j.out",
        nodes=options.nodes,
        tasks_per_node=tasks,
        gpus_per_node=options.gpus_per_node,
        gpu_type=options.gpu_type,
        cpus_per_task=options.cpus_per_task,
        memory_mb=options.mem,
        time=options.time,
        signal_minutes=options.save_before,
        options=more,
        commands=[*map(sbatch.module_command, options.modules), *options.commands],
    )
