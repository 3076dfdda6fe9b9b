"""SlurmCluster: submits the running script to SLURM, once for each trial of a search."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.extensions.search import queue, sbatch, snapshot
from lockstep.extensions.search.parser import Hyperparameters, describe
from lockstep.extensions.search.sbatch import Batch, Option, ScriptTrials
from lockstep.extensions.search.search import SCRIPT, SEARCH, SEARCHED, Search, submit_trials
from lockstep.extensions.search.trial_process import OwnSaving, has_saved, run_trial, wrap_main
from lockstep.extensions.search.trials import STDERR, STDOUT, TrialFolder, folders
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info
from lockstep.launch.attempts import trial_here
from lockstep.launch.environment import cores, python_path, started_in, visible_devices
from lockstep.launch.script import command_line

WRITERS = 8
"""Threads that write the folders of trials; each mostly waits for the disk."""
CODE = "code"
"""Folder of a search with the snapshot of its code."""

_calls = itertools.count()
"""Number of the next search in this process. A trial's process counts the same way and runs only its own search."""


@dataclass(eq=False, repr=False)
class SlurmCluster:
    """Submitter of the running script to SLURM, as one job for each trial of a search.

    The first process of the script draws the trials, writes a folder and a batch script for each, and submits them.
    In each task of such a job the script runs again, with the same arguments; there
    :meth:`optimize_parallel_cluster_gpu` reads the trial's values from its folder and calls the function with them.

    A trial that nears its time limit or is preempted is saved and requeued, and resumes there: a fit of the Trainer
    at its next boundary, other code with :meth:`set_checkpoint_save_function`. A trial whose node is lost resumes from
    its newest checkpoint. ``lockstep trials LOG_PATH`` shows the state of the trials.

    Args:
        hyperparam_optimizer: the result of ``HyperOptArgumentParser.parse_args()``; None for one trial without values.
        log_path: a folder that all nodes see. The search is written to a folder in it, named by
            ``test_tube_exp_name`` or else by the job.
        python_cmd: the command that starts Python in a job, split into words without a shell; None for the Python of
            this process.
        test_tube_exp_name: name of the search.
        enable_log_err, enable_log_out: keep the output of the trials in the files ``stderr`` and ``stdout``.
        per_experiment_nb_nodes: nodes of a trial.
        per_experiment_nb_gpus: GPUs of each node; a node runs one task for each of them.
        per_experiment_nb_cpus: CPUs of a task; None for the cluster's default.
        memory_mb_per_node: memory of each node in MiB; None for the cluster's default.
        job_time: time limit of a trial in a format of sbatch: ``"2:00:00"``, ``"1-12"``, minutes.
        minutes_to_checkpoint_before_walltime: minutes before the time limit at which a trial is saved and requeued; 0
            disables it.
        gpu_type: type of GPU, by the cluster's name for it.
        array: submit one array job instead of a job for each trial.
        at_most: number of trials of the array that run at a time.
        snapshot: copy the files that git tracks, and run the trials on the copy.
        dry_run: write everything and submit nothing.
        local: run the trials on this machine if SLURM is missing.
        max_preemptions, max_failures: how often a trial may be started again after a preemption, and after a failure.

    Raises:
        MisconfigurationException: an argument is invalid.

    Example::

        hyperparams = parser.parse_args()
        cluster = SlurmCluster(hyperparam_optimizer=hyperparams, log_path="/shared/searches")
        cluster.per_experiment_nb_gpus = 8
        cluster.optimize_parallel_cluster_gpu(main, nb_trials=9, job_name="digits")
    """

    hyperparam_optimizer: Hyperparameters | None = None
    log_path: str | Path | None = None
    python_cmd: str | None = None
    test_tube_exp_name: str | None = None
    enable_log_err: bool = True
    enable_log_out: bool = True
    _: KW_ONLY
    per_experiment_nb_nodes: int = 1
    per_experiment_nb_gpus: int = 1
    per_experiment_nb_cpus: int | None = None
    memory_mb_per_node: int | None = None
    job_time: str | int | None = None
    minutes_to_checkpoint_before_walltime: int = 5
    gpu_type: str | None = None
    array: bool = False
    at_most: int | None = None
    snapshot: bool = False
    dry_run: bool = False
    local: bool = False
    max_preemptions: int = 100
    max_failures: int = 3

    def __post_init__(self) -> None:
        self.is_from_slurm_object = trial_here() is not None
        self._options: list[Option] = []
        self._commands: list[str] = []
        self._email: tuple[str, bool, bool] | None = None
        self._saving = OwnSaving()

    # -- contents of the batch script ------------------------------------------------------------------------

    def add_slurm_cmd(self, cmd: str, value: object = None, comment: str = "") -> None:
        """Add an option of sbatch to the jobs' batch scripts.

        Args:
            cmd: name of the option, with or without dashes.
            value: value of the option; None for an option without a value.
            comment: a comment that is written above the option in the script.

        Raises:
            MisconfigurationException: ``value`` is False.

        Example::

            cluster.add_slurm_cmd("partition", "long", comment="jobs of up to a week")
        """
        self._options.append(sbatch.option(cmd, value, comment))

    def add_command(self, cmd: str) -> None:
        """Add a line of shell code, which the job runs unchanged before Python starts.

        Args:
            cmd: line of shell code, such as ``"source ~/venv/bin/activate"``.
        """
        self._commands.append(cmd)

    def load_modules(self, modules: Iterable[str]) -> None:
        """Make the jobs load environment modules.

        If a module cannot be loaded, the job ends with a message that names the module.

        Args:
            modules: a name, or several.
        """
        if isinstance(modules, str):
            modules = [modules]
        self._commands += map(sbatch.module_command, modules)

    def notify_job_status(self, email: str, on_done: bool = True, on_fail: bool = True) -> None:
        """Let SLURM send an email when a trial ends or fails.

        Args:
            email: address of the receiver.
            on_done: send an email when a trial has ended.
            on_fail: send an email when a trial has failed.
        """
        self._email = (email, on_done, on_fail)

    # -- saving outside of the Trainer -----------------------------------------------------------------------

    def set_checkpoint_save_function(
        self, fn: Callable[..., object], kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Register ``fn(**kwargs)``, which each rank calls to save a trial that is stopped outside a fit.

        Args:
            fn: function to call.
            kwargs: keyword arguments of ``fn``; None: no arguments.

        Example::

            cluster.set_checkpoint_save_function(save, {"path": "state.pt"})
            cluster.set_checkpoint_load_function(load, {"path": "state.pt"})
        """
        self._saving.save = partial(fn, **(kwargs or {}))

    def set_checkpoint_load_function(
        self, fn: Callable[..., object], kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Register ``fn(**kwargs)``, which loads what the save function has saved in an earlier start of the trial.

        The function is called before ``main``, or at once if ``main`` itself registers it.

        Args:
            fn: function to call.
            kwargs: keyword arguments of ``fn``; None: no arguments.
        """
        self._saving.load = partial(fn, **(kwargs or {}))
        here = trial_here()
        if here is not None and has_saved(here):
            self._saving.call_load()

    # -- the search ------------------------------------------------------------------------------------------

    def optimize_parallel_cluster_gpu(
        self,
        train_function: Callable[..., object],
        nb_trials: int | None = None,
        job_name: str = "trial",
        job_display_name: str | None = None,
    ) -> None:
        """Run ``train_function`` once for each trial of the search, each in its own SLURM job with GPUs.

        The function is called as ``train_function(hparams)``, or as ``train_function(hparams, cluster)`` if it has a
        second parameter for the cluster.

        In the process of a trial, this method calls the function, and returns when the function has ended.

        Args:
            train_function: a function of the script. Its return value, a number or a dict of numbers, is the result of
                the trial.
            nb_trials: number of trials; None for the whole grid.
            job_name: name of the jobs and of the search.
            job_display_name: name that squeue shows instead.

        Raises:
            MisconfigurationException: a setting is invalid, or SLURM is missing.
            SlurmRefused: sbatch failed. The message has its output and the trials that were submitted before.
        """
        self._optimize(train_function, nb_trials, job_name, job_display_name, self.per_experiment_nb_gpus)

    def optimize_parallel_cluster_cpu(
        self,
        train_function: Callable[..., object],
        nb_trials: int | None = None,
        job_name: str = "trial",
        job_display_name: str | None = None,
    ) -> None:
        """Run ``train_function`` once for each trial of the search, each in its own SLURM job without GPUs.

        A node runs one task, or ``n`` tasks after ``add_slurm_cmd("ntasks-per-node", n)``.

        Arguments as for :meth:`optimize_parallel_cluster_gpu`.

        Raises:
            MisconfigurationException: as for :meth:`optimize_parallel_cluster_gpu`.
            SlurmRefused: as for :meth:`optimize_parallel_cluster_gpu`.
        """
        self._optimize(train_function, nb_trials, job_name, job_display_name, 0)

    def _optimize(
        self, main: Callable[..., object], nb_trials: int | None, job_name: str, display_name: str | None, gpus: int
    ) -> None:
        # Counted also in a trial's process, which passes the earlier calls of the script to reach its own.
        call, here, main = next(_calls), trial_here(), wrap_main(main, lambda: self)
        if here is not None:
            if Search(Path(here.folder).parent).settings().get("call", 0) == call:
                run_trial(main, self.hyperparam_optimizer, self._saving, here)
            return
        search = self._search(job_name)
        self._check(nb_trials, gpus)
        if not self.dry_run and not queue.is_available():
            if not self.local:
                raise MisconfigurationException(
                    "there is no SLURM on this machine (sbatch is not on PATH). Use SlurmCluster(local=True) to run "
                    "the trials here, or SlurmCluster(dry_run=True) to only write the scripts"
                )
            self._run_here(search, main, nb_trials, gpus)
            return
        # A dry run leaves no events, and its folders are replaced.
        if any(trial.events() for trial in search.trials()):
            raise MisconfigurationException(
                f"{str(search.path)!r} contains a search that was submitted. Use another job_name or "
                f"test_tube_exp_name, or remove the folder. `lockstep trials {search.path}` shows the search, and "
                "--resubmit starts its trials again"
            )
        trials = self._write(search, call, nb_trials, display_name or job_name, gpus)
        if self.dry_run:
            where = search.path / SCRIPT if self.array else search.path / "trial_*" / SCRIPT
            rank_zero_info(f"dry_run=True: {len(trials)} trial(s) written, not submitted: {where}")
            return
        submit_trials(
            search, trials, lambda text: rank_zero_info(f"lockstep: {text}; see: lockstep trials {search.path}")
        )

    def _search(self, job_name: str) -> Search:
        """Return the search whose folder in ``log_path`` is named ``test_tube_exp_name`` or, without one, ``job_name``.

        Raises:
            MisconfigurationException: the name or the path is not usable as a folder.
        """
        name = self.test_tube_exp_name or job_name
        flag = "test_tube_exp_name" if self.test_tube_exp_name else "job_name"
        if not re.fullmatch(r"(?!\.{1,2}\Z)[^/\\]+", name) or not name.isprintable():
            raise MisconfigurationException(
                f"{flag}={name!r:.100} cannot name the folder of the search. Use a name without slashes, backslashes "
                "and control characters"
            )
        if self.log_path is None:
            raise MisconfigurationException(
                "log_path=None: set SlurmCluster(log_path=...) to a folder that all nodes see"
            )
        path = Path(self.log_path).expanduser().absolute()
        # sbatch treats backslashes in output paths as escapes.
        if not str(path).isprintable() or "\\" in str(path):
            raise MisconfigurationException(
                f"log_path={str(path)!r}: SLURM does not accept backslashes or control characters in the path of a "
                "job's output. Use another folder"
            )
        return Search(path / name)

    def _check(self, nb_trials: int | None, gpus: int) -> None:
        """Raise an error if a numeric setting is below its minimum, or if two settings contradict each other."""
        least = {
            "nb_trials": (nb_trials, 1),
            "per_experiment_nb_nodes": (self.per_experiment_nb_nodes, 1),
            "per_experiment_nb_cpus": (self.per_experiment_nb_cpus, 1),
            "per_experiment_nb_gpus": (self.per_experiment_nb_gpus, 1 if gpus else 0),
            "memory_mb_per_node": (self.memory_mb_per_node, 0),
            "minutes_to_checkpoint_before_walltime": (self.minutes_to_checkpoint_before_walltime, 0),
            "at_most": (self.at_most, 1),
            "max_preemptions": (self.max_preemptions, 0),
            "max_failures": (self.max_failures, 0),
        }
        for name, (value, smallest) in least.items():
            if value is not None and (not isinstance(value, int) or value < smallest):
                raise MisconfigurationException(f"{name}={value!r}: pass an integer of at least {smallest}")
        if self.at_most is not None and not self.array:
            raise MisconfigurationException(f"at_most={self.at_most} is for array jobs only. Set array=True as well")
        if nb_trials is None and self.hyperparam_optimizer is not None and self.hyperparam_optimizer.draws_late:
            raise MisconfigurationException("nb_trials=None: strategy='optuna' needs a number of trials. Set nb_trials")

    def _run_here(self, search: Search, main: Callable[[Any], object], nb_trials: int | None, gpus: int) -> None:
        """Run the trials on this machine, as many at a time as its devices allow.

        Raises:
            MisconfigurationException: the machine has fewer GPUs than a trial needs.
            RuntimeError: all trials failed.
        """
        rank_zero_info(
            f"lockstep: there is no SLURM, so the trials run on this machine; see: lockstep trials {search.path}"
        )
        options = self.hyperparam_optimizer
        if options is None:
            main(None)
        elif gpus:
            there = visible_devices()
            if len(there) < gpus:
                raise MisconfigurationException(
                    f"per_experiment_nb_gpus={gpus}, but this machine has {len(there)} GPU(s). Set a lower number, or "
                    "call optimize_parallel_cluster_cpu"
                )
            # Groups of whole trials only: devices that are left over stay idle.
            groups = [",".join(there[at : at + gpus]) for at in range(0, len(there) - gpus + 1, gpus)]
            options.optimize_parallel_gpu(main, gpu_ids=groups, nb_trials=nb_trials, log_path=search.path)
        else:
            workers = max(1, cores() // ((self.per_experiment_nb_cpus or 1) * self._tasks()))
            options.optimize_parallel_cpu(main, nb_trials, workers, log_path=search.path)

    # -- files -----------------------------------------------------------------------------------------------

    def _write(self, search: Search, call: int, nb_trials: int | None, name: str, gpus: int) -> list[TrialFolder]:
        """Write the folder and the batch script of each trial.

        Raises:
            MisconfigurationException: a value or an option is invalid, or a folder cannot be written.
        """
        batch = self._batch(search, name, gpus, ScriptTrials(str(search.path)))
        # Errors in options are raised before any folder is removed or written.
        sbatch.text(batch)
        try:
            _clear(search)
            words, folder, variables = self._command(search)
            with ThreadPoolExecutor(WRITERS) as pool:
                trials = list(pool.map(_write_folder, self._draw_all(search, nb_trials)))
            search.write(
                {
                    "name": name,
                    "call": call,
                    "array": self.array,
                    "at_most": self.at_most,
                    "max_preemptions": self.max_preemptions,
                    "max_failures": self.max_failures,
                    "command": words,
                    SEARCHED: None if self.hyperparam_optimizer is None else describe(self.hyperparam_optimizer),
                }
            )
            if self.array:
                scripts = [(search.path, ScriptTrials(str(search.path), None, len(trials), self.at_most))]
            else:
                scripts = [(trial.path, ScriptTrials(str(search.path), trial.number)) for trial in trials]
            for path, which in scripts:
                batch = self._batch(search, name, gpus, which)
                text = sbatch.text(replace(batch, command=words, folder=folder, variables=variables))
                (path / SCRIPT).write_bytes(text.encode(errors="surrogateescape"))
        except OSError as error:
            raise MisconfigurationException(
                f"log_path={str(self.log_path)!r} cannot be written ({error}). Use a writable folder that all nodes see"
            ) from error
        return trials

    def _draw_all(self, search: Search, nb_trials: int | None) -> Iterator[tuple[TrialFolder, dict[str, Any] | None]]:
        """Yield (folder, values) for each trial; values are None if they are drawn when the trial starts."""
        options = self.hyperparam_optimizer
        if options is None:
            yield from ((TrialFolder.of(search.path, number), {}) for number in range(nb_trials or 1))
        elif options.draws_late:
            yield from ((TrialFolder.of(search.path, number), None) for number in range(nb_trials or 0))
        else:
            for number, drawn in enumerate(options.trials(nb_trials)):
                yield TrialFolder.of(search.path, number), drawn.values()

    def _command(self, search: Search) -> tuple[list[str], str, dict[str, str]]:
        """Return (command of a trial, its working directory, its additional environment variables)."""
        import __main__

        words = command_line(__main__, sys.argv, sys.orig_argv)
        if words is None:
            raise MisconfigurationException(
                "SlurmCluster submits the running script, but there is none. Save the code as a file and run it"
            )
        python = words[:1] if self.python_cmd is None else shlex.split(self.python_cmd)
        folder = started_in or "/"
        if not self.snapshot:
            return [*python, *words[1:]], folder, {}
        copied = snapshot.copy(search.path / CODE, words, folder, python_path())
        variables = {} if copied.python_path is None else {"PYTHONPATH": copied.python_path}
        return [*python, *copied.words[1:]], copied.folder, variables

    def _batch(self, search: Search, name: str, gpus: int, trials: ScriptTrials) -> Batch:
        """Return the settings of the batch script for these trials, with a placeholder as the command."""
        # %4a is SLURM's pattern for the array's task, with four digits as in the folders' names.
        which = "trial_%4a" if trials.number is None else f"trial_{trials.number:04}"
        logs = f"{str(search.path).replace('%', '%%')}/{which}"
        email, on_done, on_fail = self._email or (None, False, False)
        return Batch(
            name=name,
            command=["python"],
            folder="/",
            output=f"{logs}/{STDOUT}" if self.enable_log_out else "/dev/null",
            error=f"{logs}/{STDERR}" if self.enable_log_err else "/dev/null",
            nodes=self.per_experiment_nb_nodes,
            tasks_per_node=gpus or self._tasks(),
            gpus_per_node=gpus,
            gpu_type=self.gpu_type,
            cpus_per_task=self.per_experiment_nb_cpus,
            memory_mb=self.memory_mb_per_node,
            time=None if self.job_time is None else str(self.job_time),
            signal_minutes=self.minutes_to_checkpoint_before_walltime,
            email=email,
            on_done=on_done,
            on_fail=on_fail,
            options=self._options,
            commands=self._commands,
            trials=trials,
        )

    def _tasks(self) -> int:
        """Return the number of tasks that a job without GPUs runs on each node."""
        given = {option.name: option.value for option in self._options}.get("ntasks-per-node", "1")
        if not re.fullmatch("0*[1-9][0-9]*", str(given)):
            raise MisconfigurationException(
                f"add_slurm_cmd('ntasks-per-node', {given!r}): pass an integer of at least 1"
            )
        return int(str(given))


def _write_folder(drawn: tuple[TrialFolder, Mapping[str, Any] | None]) -> TrialFolder:
    trial, values = drawn
    # SLURM writes the job's output here. Before 23.02 a job fails without any message if the folder is missing.
    trial.path.mkdir(parents=True, exist_ok=True)
    if values is not None:
        trial.write_values(values)
    return trial


def _clear(search: Search) -> None:
    """Remove the files of an earlier dry run."""
    for trial in folders(search.path):
        shutil.rmtree(trial.path)
    for name in (SEARCH, SCRIPT):
        (search.path / name).unlink(missing_ok=True)
    search.path.mkdir(parents=True, exist_ok=True)
