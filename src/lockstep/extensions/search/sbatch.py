"""Text of a batch script for ``sbatch``, made from the settings of a job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.cluster.slurm import STARTS
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.attempts import TRIAL
from lockstep.launch.environment import ROOT
from lockstep.launch.script import arguments


@dataclass(frozen=True)
class Option:
    """An option of ``sbatch`` that the user has added."""

    name: str  #: without leading dashes
    value: str | None = None  #: None for an option without a value
    comment: str = ""


@dataclass(frozen=True)
class ScriptTrials:
    """The trials that one batch script runs: a single trial, or all trials of a search as an array job."""

    search: str  #: the folder of the search
    number: int | None = None  #: None for an array job, where SLURM_ARRAY_TASK_ID is the number
    count: int = 1  #: number of trials of the array, from trial 0
    at_most: int | None = None  #: number of trials of the array that run at a time


@dataclass(frozen=True)
class Batch:
    """Settings of a batch script: resources, options and command.

    Attributes:
        name: name of the job.
        command: words of the command of each task.
        folder: working directory of the tasks.
        output, error: files for the output of the tasks; ``%`` starts a pattern of SLURM. None: SLURM's default.
        nodes: number of nodes.
        tasks_per_node: number of tasks on each node.
        gpus_per_node: number of GPUs on each node; 0 for none.
        gpu_type: type of GPU, by the cluster's name for it.
        cpus_per_task, memory_mb, time: limits; None for the cluster's default.
        signal_minutes: minutes before the time limit at which the tasks receive SIGUSR1; 0 for no signal.
        email: address for SLURM's mail; None for no mail.
        on_done, on_fail: send mail when the job ends, when it fails.
        options: options added by the user.
        commands: shell lines that run before the tasks start, unchanged.
        variables: additional environment variables.
        trials: trials of a search that the script runs; None without a search.
    """

    name: str
    command: Sequence[str]
    folder: str
    output: str | None = None
    error: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    cpus_per_task: int | None = None
    memory_mb: int | None = None
    time: str | None = None
    signal_minutes: int = 5
    email: str | None = None
    on_done: bool = False
    on_fail: bool = False
    options: Sequence[Option] = ()
    commands: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    trials: ScriptTrials | None = None


FROM = {
    "nodes": "per_experiment_nb_nodes (lockstep submit: --nodes)",
    "ntasks-per-node": "per_experiment_nb_gpus (lockstep submit: --tasks-per-node)",
    "gres": "per_experiment_nb_gpus and gpu_type (lockstep submit: --gpus-per-node, --gpu-type)",
    "cpus-per-task": "per_experiment_nb_cpus (lockstep submit: --cpus-per-task)",
    "mem": "memory_mb_per_node (lockstep submit: --mem)",
    "time": "job_time (lockstep submit: --time)",
    "signal": "minutes_to_checkpoint_before_walltime (lockstep submit: --save-before)",
    "job-name": "job_name (lockstep submit: --job-name)",
    "array": "array and at_most",
    "mail-user": "notify_job_status",
    "mail-type": "notify_job_status",
    "output": "log_path (lockstep submit: --output)",
    "error": "log_path",
}
"""Arguments that set an option of the script, by the option's name."""

SHORT = {
    "A": "account", "a": "array", "c": "cpus-per-task", "C": "constraint", "D": "chdir", "e": "error", "J": "job-name",
    "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist",
    "x": "exclude", "G": "gpus",
}  # fmt: skip
"""Long names of sbatch's options by their letters."""
CONTROL = r"[\x00-\x1f\x7f]"
"""Control characters, which end a line or control a terminal."""


def option(cmd: str, value: object = None, comment: str = "") -> Option:
    """Create an option of ``sbatch`` from its name or letter, with or without dashes.

    True as the value means an option without a value.

    Raises:
        MisconfigurationException: the value is False.

    Example:
        >>> option("-p", "long"), option("exclusive")
        (Option(name='partition', value='long', comment=''), Option(name='exclusive', value=None, comment=''))
    """
    name = cmd.lstrip("-")
    if value is False:
        raise MisconfigurationException(
            f"{cmd}=False: options of sbatch cannot be turned off. Remove this call of add_slurm_cmd"
        )
    # Compared by identity, because 1 equals True but is a value.
    bare = value is None or value is True or value == ""
    return Option(SHORT.get(name, name), None if bare else str(value), comment)


def to_minutes(time: str | int | None) -> float | None:
    """Convert one of sbatch's formats of time limits to minutes; return None for text in no such format.

    Example:
        >>> to_minutes("2:00:00"), to_minutes("15"), to_minutes("1-12"), to_minutes("15:30"), to_minutes("UNLIMITED")
        (120.0, 15.0, 2160.0, 15.5, None)
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", str(time))
    if found is None:
        return None
    parts = [float(part) for part in found[2].split(":")]
    # Without days, one number is minutes, and two are minutes and seconds. With days the first number is hours.
    if found[1] is None and len(parts) < 3:
        parts = [0.0, *parts]
    hours, minutes, seconds = [*parts, 0.0, 0.0][:3]
    return 1440 * float(found[1] or 0) + 60 * hours + minutes + seconds / 60


def text(batch: Batch) -> str:
    """Return the text of a job's batch script.

    Raises:
        MisconfigurationException: an option has an invalid name or value or contradicts the script, or the time limit
            is not longer than ``signal_minutes``.

    Example:
        >>> print(text(Batch("mine", ["python", "train.py", "--name", "a b"], "/home/me")), end="")
        #!/bin/bash
        #SBATCH --job-name=mine
        #SBATCH --nodes=1
        #SBATCH --ntasks-per-node=1
        #SBATCH --signal=USR1@300
        #SBATCH --open-mode=append
        #SBATCH --requeue
        <BLANKLINE>
        cd -- /home/me || exit 1
        srun --kill-on-bad-exit=1 --export=ALL python train.py --name 'a b'
    """
    minutes = to_minutes(batch.time)
    if minutes is not None and minutes <= batch.signal_minutes:
        raise MisconfigurationException(
            f"{FROM['time']} {batch.time} is not longer than {FROM['signal']} {batch.signal_minutes}, in minutes, so "
            "the job would be requeued as soon as it starts. Increase the time limit, or set those minutes to 0"
        )
    lines = ["#!/bin/bash", *_options(batch), ""]
    if batch.trials is not None:
        lines += _trial(batch.trials)
    lines += [f"export {name}={quoted(value)}" for name, value in batch.variables.items()]
    lines.append(f"cd -- {quoted(batch.folder)} || exit 1")
    lines += batch.commands
    cpus = {} if batch.cpus_per_task is None else {"SLURM_CPUS_PER_TASK": str(batch.cpus_per_task)}
    words = arguments("srun", list(batch.command), {"SLURM_NTASKS": "", **cpus})
    lines.append(" ".join(map(quoted, words)))
    return "\n".join([*lines, ""])


def module_command(module: str) -> str:
    """Return a shell line that loads an environment module, or prints an error and ends the job if this fails.

    Example:
        >>> print(module_command("cuda/12"))
        module load cuda/12 || { echo 'lockstep: the module cuda/12 could not be loaded' >&2; exit 1; }
    """
    message = quoted(f"lockstep: the module {module} could not be loaded")
    return f"module load {quoted(module)} || {{ echo {message} >&2; exit 1; }}"


def _options(batch: Batch) -> list[str]:
    """Return the ``#SBATCH`` lines of a batch script.

    If the user has added an option that the script has anyway, the user's one is kept, with its comment.
    """
    own = _own_options(batch)
    for option in batch.options:
        _check(option, own, batch)
    lines = {name: Option(name, value) for name, value in own.items()} | {each.name: each for each in batch.options}
    # The script requeues by default, and the two options contradict each other.
    if "no-requeue" in lines:
        del lines["requeue"]
    return [line for option in lines.values() for line in _lines(option)]


def _own_options(batch: Batch) -> dict[str, str | None]:
    """Return {name: value} of the ``sbatch`` options that follow from the settings."""
    trials, kind = batch.trials, "" if batch.gpu_type is None else f"{batch.gpu_type}:"
    array = None
    if trials is not None and trials.number is None:
        array = f"0-{trials.count - 1}" + ("" if trials.at_most is None else f"%{trials.at_most}")
    events = [event for event, is_wanted in (("END", batch.on_done), ("FAIL", batch.on_fail)) if is_wanted]
    found: dict[str, object] = {
        "job-name": batch.name,
        "array": array,
        "output": batch.output,
        "error": batch.error,
        "nodes": batch.nodes,
        "ntasks-per-node": batch.tasks_per_node,
        "gres": f"gpu:{kind}{batch.gpus_per_node}" if batch.gpus_per_node else None,
        "cpus-per-task": batch.cpus_per_task,
        "mem": batch.memory_mb,
        "time": batch.time,
        "signal": f"USR1@{60 * batch.signal_minutes}" if batch.signal_minutes else None,
        "mail-user": batch.email,
        "mail-type": None if batch.email is None else ",".join(events or ["NONE"]),
        "open-mode": "append",  # by default a requeued job truncates the output of the earlier start
    }
    return {name: str(value) for name, value in found.items() if value is not None} | {"requeue": None}


def _check(option: Option, own: Mapping[str, str | None], batch: Batch) -> None:
    """Raise an error if an option that the user has added contradicts the options of the script."""
    given = f"option --{option.name}{'' if option.value is None else f'={option.value}'} of sbatch"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]+", option.name):
        raise MisconfigurationException(f"{given} is not a long name. Use the option's long name, such as 'partition'")
    if option.name in own and own[option.name] != option.value:
        way = f"set {FROM[option.name]} instead" if option.name in FROM else "remove it"
        raise MisconfigurationException(f"{given} contradicts --{option.name}={own[option.name]} of the script: {way}")
    tasks = batch.nodes * batch.tasks_per_node
    if option.name == "ntasks" and option.value != str(tasks):
        raise MisconfigurationException(
            f"{given}, but {batch.nodes} node(s) with {batch.tasks_per_node} task(s) each make {tasks} tasks. Remove "
            "the option, or set the numbers of nodes and tasks per node"
        )


def _lines(option: Option) -> list[str]:
    """Return the ``#SBATCH`` line of an option, and before it a line with the option's comment, if any."""
    comment, line = " ".join(option.comment.split()), f"#SBATCH --{option.name}"
    if option.value is not None:
        value = option.value
        if not value.isprintable():
            raise MisconfigurationException(
                f"--{option.name}={value!r:.100} cannot be written to a batch script, where an option is one line. "
                "Remove newlines and other control characters"
            )
        # sbatch reads quotes and backslashes in its lines as a shell does, but knows no other quoting.
        if not re.fullmatch(r"[\w.,:;@%/+=~^\[\]-]+", value):
            value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        line = f"{line}={value}"
    return [f"# {comment}", line] if comment else [line]


def _trial(trials: ScriptTrials) -> list[str]:
    if trials.number is None:
        first = f'printf -v {TRIAL} "%s/trial_%04d" {quoted(trials.search)} "$SLURM_ARRAY_TASK_ID"'
    else:
        first = f"{TRIAL}={quoted(f'{trials.search}/trial_{trials.number:04}')}"
    # The first argument of the script is the number of starts before this submission.
    return [first, f'{STARTS}="${{1:-0}}"', f'{ROOT}="${TRIAL}"', f"export {TRIAL} {STARTS} {ROOT}"]


def quoted(word: str) -> str:
    """Quote a word for bash, so that it stays on one line; control characters become octal escapes.

    Raises:
        MisconfigurationException: the word contains a NUL, which no argument of a command can contain.

    Example:
        >>> print(quoted("a $b"), quoted("two\\nlines"))
        'a $b' $'two\\012lines'
    """
    if "\0" in word:
        raise MisconfigurationException(f"{word!r:.100} contains a NUL, which arguments of commands cannot contain")
    if not re.search(CONTROL, word):
        return shlex.quote(word)
    # Always three octal digits: a hexadecimal escape would include hexadecimal letters that follow it.
    escaped = re.sub(CONTROL, lambda found: f"\\{ord(found[0]):03o}", re.sub(r"[\\']", r"\\\g<0>", word))
    return f"$'{escaped}'"
