"""Code of a trial's process, which calls the user's function with the trial's values and records how the trial ends."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from signal import SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from lockstep.extensions.search.parser import Hyperparameters
from lockstep.extensions.search.search import Search
from lockstep.extensions.search.trials import End, TrialFolder, read_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log, rank_zero_only
from lockstep.launch.attempts import Job, Superseded, Trial, await_end, job_here
from lockstep.supervise.signals import by_default, end_at_once, handling

LONGEST_ERROR = 1000


@dataclass
class OwnSaving:
    """The user's own functions that save and load a trial. A function that the user has not set is None."""

    save: Callable[[], object] | None = None
    load: Callable[[], object] | None = None

    def call_load(self) -> None:
        """Call the user's load function if it is set and has not been called yet."""
        load, self.load = self.load, None
        if load is not None:
            load()


def run_trial(main: Callable[[Any], object], options: Hyperparameters | None, saving: OwnSaving, here: Trial) -> None:
    """Call ``main(hparams)`` in a process of the trial ``here``, and record its start, result and end.

    Rank 0 records the start and the end; each rank records its own failure. The return value of ``main``, a number or a
    dict of numbers, is the result of the trial.

    Raises:
        Superseded: the trial was started again elsewhere.
        MisconfigurationException: the trial was preempted more often than allowed.
        BaseException: any exception of ``main``.
    """
    start = _Start(options, saving, here)
    earlier = read_events(start.trial.events()).attempts
    if any(each.end == "completed" and each.number < here.attempt for each in earlier):
        return  # the job was requeued after the trial had completed
    try:
        start.begin()
        with start.acts_on_signals():
            if has_saved(here):
                saving.call_load()
            metrics, value = to_metrics(main(start.hparams))
    except Superseded:  # not a failure: the newer start records the trial's end
        raise
    except BaseException as error:
        # sys.exit() and sys.exit(0) are a normal end of a script.
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            start.fail(error)
            raise
        metrics, value = {}, None
    start.complete(metrics, value)


def has_saved(here: Trial) -> bool:
    """Return True if the user's save function was called in an earlier start of the trial."""
    return here.attempt > 0 and any(event.get("event") == "saved" for event in TrialFolder(here.folder).events())


class _Start:
    """Recorder of one start of a trial, in one rank's process: provides the trial's values, and records the end.

    Args:
        options: options of the script, replaced by the trial's values.
        saving: the user's own functions.
        here: the trial that this process is part of.
    """

    def __init__(self, options: Hyperparameters | None, saving: OwnSaving, here: Trial) -> None:
        self.trial, self.here, self.saving, self._options = TrialFolder(here.folder), here, saving, options
        self.leads = rank_zero_only.rank == 0
        self.hparams: Hyperparameters | None = None
        self._busy = self._saved = False

    def note(self, event: str, **details: object) -> None:
        """Record an event of the trial, on rank 0 only."""
        if self.leads:
            self.trial.note(event, attempt=self.here.attempt, **details)

    def begin(self) -> None:
        """Record the start on rank 0, and read or draw the trial's values.

        Raises:
            Superseded: there is a newer start.
            MisconfigurationException: the trial was preempted too often.
        """
        if self.leads:
            newest = max((attempt.number for attempt in read_events(self.trial.events()).attempts), default=0)
            if newest > self.here.attempt:
                raise Superseded(
                    f"the trial in {self.trial.path} was started again as attempt {newest}, so this attempt, "
                    f"{self.here.attempt}, ends"
                )
            self.note("started", job=self.here.job)
            # Counted after this start is recorded, because a preemption is a start that another one follows.
            preemptions = read_events(self.trial.events()).preemptions
            most = Search(self.trial.path.parent).limits.preemptions
            if preemptions > most:
                raise MisconfigurationException(
                    f"the trial was preempted {preemptions} times, but max_preemptions is {most}. Increase it in "
                    "SlurmCluster, or find out why the trial does not complete"
                )
        self.hparams = self._values()

    def _values(self) -> Hyperparameters | None:
        """Return the options with the trial's values, which are read from the trial's file or drawn by the study."""
        if self._options is None:
            return None
        if self._options.draws_late:
            drawn = self._options.draw(self.trial.number, self.trial.path.parent)
            if self.leads:
                self.trial.write_values(drawn.values())
            return drawn
        values = self.trial.values()
        if values is None:
            raise MisconfigurationException(
                f"{self.trial.path} has no values.json. Check that this node sees the folder"
            )
        return self._options.with_values(values, self.trial.number)

    def fail(self, error: BaseException) -> None:
        """Record why this rank failed; rank 0 also reports the failure to the study."""
        self.trial.note("failed", attempt=self.here.attempt, rank=rank_zero_only.rank, error=error_line(error))
        self._finish("failed")

    def complete(self, metrics: Mapping[str, float], value: float | None) -> None:
        """Record that the trial has completed, with its result, in the study and in the trial's folder.

        Only rank 0 records.
        """
        if metrics and self.leads:
            self.trial.log(metrics, attempt=self.here.attempt)
        if self._finish("completed", value) == "pruned":
            self.note("pruned")
        self.note("completed", value=value)

    def _finish(self, state: End, value: float | None = None) -> End:
        """On rank 0, report to the study how the trial ended, and return the state that the study then records."""
        if self.hparams is None or not self.leads:
            return state
        return self.hparams.finish(self.trial.number, state, value)

    # -- signals outside of a fit --------------------------------------------------------------------------

    @contextmanager
    def acts_on_signals(self) -> Iterator[None]:
        """Within a context, handle the signals that announce a time limit or preemption.

        During a fit, the Trainer handles them instead.

        SIGUSR1 and SIGUSR2 requeue the job if the user's own function saves, or if an earlier fit has left a
        checkpoint. Otherwise they have no effect, because the trial could only start from scratch.
        """
        job = None if self.here.job is None else job_here(self.here.folder)
        if job is None:
            yield
            return
        with handling((SIGUSR1, SIGUSR2, SIGTERM), partial(self._act, job), is_replaceable=True):
            yield

    def _act(self, job: Job, number: int) -> None:
        if self._busy:  # schedulers send signals twice
            return
        if number == SIGTERM:
            self._busy = True
            if not self._saved:
                self._save()
                # SLURM ends the job. If the process ended first, the job would count as completed or failed.
                await_end()
            end_at_once()
        # Without a checkpoint, a requeued trial would start from scratch, and reach its limit again.
        if self.saving.save is None and not job.check().get("saved"):
            return
        self._busy = True
        self._save()
        self._saved = True
        if self.leads:
            with by_default(SIGTERM):
                refused = job.requeue()
                if not refused:
                    await_end()
            log.warning("lockstep: the trial is saved, but continues, because its job was not requeued: %s", refused)
            self._saved = False
        self._busy = False

    def _save(self) -> None:
        if self.saving.save is not None:
            self.saving.save()
            self.note("saved")


# -- the user's function -------------------------------------------------------------------------------------


def takes_cluster(main: Callable[..., Any]) -> bool:
    """Return True if a function accepts the cluster as its second argument.

    Example:
        >>> takes_cluster(lambda hparams: 0), takes_cluster(lambda hparams, cluster: 0)
        (False, True)
    """
    try:
        parameters = list(inspect.signature(main).parameters.values())
    except (TypeError, ValueError):
        return False
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(places) < 2:
        return any(each.kind is each.VAR_POSITIONAL for each in parameters)
    return places[1].default is places[1].empty or places[1].name == "cluster"


def wrap_main(main: Callable[..., object], second: Callable[[], object]) -> Callable[[Any], object]:
    """Wrap a function so that it can be called with the hyperparameters only.

    If it has a second parameter for the cluster, this receives the result of ``second()``.
    """
    return (lambda hparams: main(hparams, second())) if takes_cluster(main) else main


def to_metrics(returned: object) -> tuple[dict[str, float], float | None]:
    """Return (metrics, value) from the result of the trial's function: metrics by name, and the trial's value.

    The value is None unless the function has returned a number.

    Example:
        >>> to_metrics(0.5), to_metrics({"loss": 1, "name": "x"}), to_metrics(None)
        (({'value': 0.5}, 0.5), ({'loss': 1.0}, None), ({}, None))
    """
    if isinstance(returned, Mapping):
        numbers = {str(name): _number(value) for name, value in returned.items()}
        return {name: value for name, value in numbers.items() if value is not None}, None
    value = _number(returned)
    return ({} if value is None else {"value": value}), value


def _number(value: object) -> float | None:
    item = getattr(value, "item", None)
    if callable(item):  # a tensor or a NumPy number
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # several elements
            return None
    return float(value) if isinstance(value, Real) else None


def error_line(error: BaseException) -> str:
    """Format an exception as in the last line of its traceback.

    Example:
        >>> error_line(ValueError("no such thing"))
        'ValueError: no such thing'
    """
    lines = "".join(traceback.format_exception_only(type(error), error)).split("\n")
    return " ".join(line.strip() for line in lines if line.strip())[:LONGEST_ERROR]
