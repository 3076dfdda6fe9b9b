"""A trial's process: the user's function is called with the trial's values, and its end is noted."""

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
    """The user's own functions that save and load; None: there is none."""

    save: Callable[[], object] | None = None
    load: Callable[[], object] | None = None

    def call_load(self) -> None:
        """Call the function that loads, if there is one, for the first time."""
        load, self.load = self.load, None
        if load is not None:
            load()


def run_trial(main: Callable[[Any], object], options: Hyperparameters | None, saving: OwnSaving, here: Trial) -> None:
    """Call ``main(hparams)`` as the trial ``here``.

    Rank 0 notes the start and the end; any rank notes its failure. What ``main`` returns is the trial's result: a
    number, or a dict of numbers.

    Raises:
        Superseded: the trial has been started anew elsewhere.
        MisconfigurationException: the trial was preempted more often than it may be.
        BaseException: what ``main`` raised.
    """
    start = _Start(options, saving, here)
    earlier = read_events(start.trial.events()).attempts
    if any(each.end == "completed" and each.number < here.attempt for each in earlier):
        return  # its job was requeued behind its last word
    try:
        start.begin()
        with start.acts_on_signals():
            if has_saved(here):
                saving.call_load()
            metrics, value = measured(main(start.hparams))
    except Superseded:  # the newer start speaks for itself
        raise
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            start.fail(error)
            raise
        metrics, value = {}, None
    start.complete(metrics, value)


def has_saved(here: Trial) -> bool:
    """Whether an earlier start of the trial was saved by the user's own function."""
    return here.attempt > 0 and any(told.get("event") == "saved" for told in TrialFolder(here.folder).events())


class _Start:
    """One start of a trial, in the process of one of its ranks.

    Args:
        options: of the script; the trial's values go in their place.
        saving: the user's own functions.
        here: which trial this process is a part of.
    """

    def __init__(self, options: Hyperparameters | None, saving: OwnSaving, here: Trial) -> None:
        self.trial, self.here, self.saving, self._options = TrialFolder(here.folder), here, saving, options
        self.leads = rank_zero_only.rank == 0
        self.hparams: Hyperparameters | None = None
        self._busy = self._saved = False

    def note(self, event: str, **details: object) -> None:
        """Note an event. On rank 0."""
        if self.leads:
            self.trial.note(event, attempt=self.here.attempt, **details)

    def begin(self) -> None:
        """Note the start, on rank 0, and find the trial's values."""
        if self.leads:
            self._note_start()
        self.hparams = self._values()

    def _note_start(self) -> None:
        """Note the start, unless there is a newer one or there have been too many."""
        newest = max((attempt.number for attempt in read_events(self.trial.events()).attempts), default=0)
        if newest > self.here.attempt:
            raise Superseded(
                f"the trial in {self.trial.path} has been started anew: attempt {newest}; here it is "
                f"{self.here.attempt}"
            )
        self.note("started", job=self.here.job)
        preemptions = read_events(self.trial.events()).preemptions
        most = Search(self.trial.path.parent).limits.preemptions
        if preemptions > most:
            raise MisconfigurationException(
                f"the trial was preempted {preemptions} times, max_preemptions is {most}: give SlurmCluster a higher "
                "one, or see why it never comes to its end"
            )

    def _values(self) -> Hyperparameters | None:
        """The options with the trial's values: of its file, or of the study, where they are drawn late."""
        if self._options is None:
            return None
        if self._options.drawn_late:
            drawn = self._options.draw(self.trial.number, self.trial.path.parent)
            if self.leads:
                self.trial.write_values(drawn.values())
            return drawn
        values = self.trial.values()
        if values is None:
            raise MisconfigurationException(f"{self.trial.path} has no values.json: does this node see the folder?")
        return self._options.with_values(values, self.trial.number)

    def fail(self, error: BaseException) -> None:
        """Note why this rank has failed; rank 0 tells the study."""
        self.trial.note("failed", attempt=self.here.attempt, rank=rank_zero_only.rank, error=last_words(error))
        self._finish("failed")

    def complete(self, metrics: Mapping[str, float], value: float | None) -> None:
        """The trial's last word, to the study and to its folder. On rank 0."""
        if metrics and self.leads:
            self.trial.log(metrics, attempt=self.here.attempt)
        if self._finish("completed", value) == "pruned":
            self.note("pruned")
        self.note("completed", value=value)

    def _finish(self, state: End, value: float | None = None) -> End:
        """Tell the study; gives how it keeps the trial. On rank 0."""
        if self.hparams is None or not self.leads:
            return state
        return self.hparams.finish(self.trial.number, state, value)

    # -- signals outside of a fit --------------------------------------------------------------------------

    @contextmanager
    def acts_on_signals(self) -> Iterator[None]:
        """Heed the signals that say that the job's time is up, or that it has to make room. A fit takes them over.

        Where the user's own function saves, or an earlier fit has left a checkpoint, SIGUSR1 and SIGUSR2 have the job
        put back into the queue. Else they change nothing: the trial has nothing that it could go on from.
        """
        job = None if self.here.job is None else job_here(self.here.folder)
        if job is None:
            yield
            return
        with handling((SIGUSR1, SIGUSR2, SIGTERM), partial(self._act, job), replaceable=True):
            yield

    def _act(self, job: Job, number: int) -> None:
        if self._busy:  # schedulers send signals twice
            return
        if number == SIGTERM:
            self._busy = True
            if not self._saved:
                self._save()
                await_end()  # had it ended by itself, its job would be complete, or failed
            end_at_once()
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
            log.warning("lockstep: the trial is saved, and goes on, for its job was not requeued: %s", refused)
            self._saved = False
        self._busy = False

    def _save(self) -> None:
        if self.saving.save is not None:
            self.saving.save()
            self.note("saved")


# -- the user's function -------------------------------------------------------------------------------------


def takes_cluster(main: Callable[..., Any]) -> bool:
    """Whether a function wants the cluster, too, as its second argument.

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


def of_hparams(main: Callable[..., object], second: Callable[[], object]) -> Callable[[Any], object]:
    """A function of the hyperparameters alone: one that wants a second argument gets what ``second`` gives."""
    return (lambda hparams: main(hparams, second())) if takes_cluster(main) else main


def measured(returned: object) -> tuple[dict[str, float], float | None]:
    """What a function that returned this has measured: metrics by name, and its value if it is a number.

    Example:
        >>> measured(0.5), measured({"loss": 1, "name": "x"}), measured(None)
        (({'value': 0.5}, 0.5), ({'loss': 1.0}, None), ({}, None))
    """
    if isinstance(returned, Mapping):
        numbers = {str(name): _number(value) for name, value in returned.items()}
        return {name: value for name, value in numbers.items() if value is not None}, None
    value = _number(returned)
    return ({} if value is None else {"value": value}), value


def _number(value: object) -> float | None:
    item = getattr(value, "item", None)
    if callable(item):  # a tensor, or a number of NumPy's
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # of several elements
            return None
    return float(value) if isinstance(value, Real) else None


def last_words(error: BaseException) -> str:
    """An exception as the last line of its traceback says it.

    Example:
        >>> last_words(ValueError("no such thing"))
        'ValueError: no such thing'
    """
    lines = "".join(traceback.format_exception_only(type(error), error)).split("\n")
    return " ".join(line.strip() for line in lines if line.strip())[:LONGEST_ERROR]
