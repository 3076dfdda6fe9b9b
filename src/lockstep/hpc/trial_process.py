"""A trial's process: the user's function is called with the trial's values, and its end is noted."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from signal import SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log, rank_zero_only
from lockstep.hpc.parser import Hyperparameters
from lockstep.hpc.search import Search
from lockstep.hpc.trials import TrialFolder, read_events
from lockstep.launch.attempts import Superseded, Trial, await_end, job_here
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


def _note_failure(trial: TrialFolder, hparams: Hyperparameters | None, here: Trial, error: BaseException) -> None:
    """Note why a trial has failed, and tell the study, if this rank leads; a later attempt speaks for itself."""
    if isinstance(error, Superseded):
        return
    trial.note("failed", attempt=here.attempt, rank=rank_zero_only.rank, error=last_words(error))
    if hparams is not None:
        hparams.finish(trial.number, "failed")


def run_trial(main: Callable[[Any], object], options: Hyperparameters | None, saving: OwnSaving, here: Trial) -> None:
    """Call ``main(hparams)`` as the trial ``here``.

    Rank 0 notes the start and the end; any rank notes its failure. What ``main`` returns is the trial's result: a
    number, or a dict of numbers.

    Raises:
        Superseded: the trial has been started anew elsewhere.
        MisconfigurationException: the trial was preempted more often than it may be.
        BaseException: what ``main`` raised.
    """
    trial = TrialFolder(here.folder)
    if any(start.end == "completed" and start.number < here.attempt for start in read_events(trial.events()).attempts):
        return  # its job was requeued behind its last word
    leads = rank_zero_only.rank == 0
    hparams: Hyperparameters | None = None
    try:
        if leads:
            _begin(trial, here)
        hparams = _values(trial, options, leads)
        with _signals_acted_on(trial, saving, here, leads):
            if has_saved(here):
                saving.call_load()
            metrics, value = measured(main(hparams))
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            _note_failure(trial, hparams if leads else None, here, error)
            raise
        metrics, value = {}, None
    if leads:
        _complete(trial, hparams, here, metrics, value)


def has_saved(here: Trial) -> bool:
    """Whether an earlier start of the trial was saved by the user's own function."""
    return here.attempt > 0 and any(told.get("event") == "saved" for told in TrialFolder(here.folder).events())


def _begin(trial: TrialFolder, here: Trial) -> None:
    """Note the start, unless there is a newer one or there have been too many."""
    history = read_events(trial.events())
    newest = max((attempt.number for attempt in history.attempts), default=0)
    if newest > here.attempt:
        raise Superseded(
            f"the trial in {trial.path} has been started anew: attempt {newest}; here it is {here.attempt}"
        )
    trial.note("started", attempt=here.attempt, job=here.job)
    history = read_events(trial.events())
    most = Search(trial.path.parent).limits.preemptions
    if history.preemptions > most:
        raise MisconfigurationException(
            f"the trial was preempted {history.preemptions} times, max_preemptions is {most}: give SlurmCluster a "
            "higher one, or see why it never comes to its end"
        )


def _values(trial: TrialFolder, options: Hyperparameters | None, leads: bool) -> Hyperparameters | None:
    """The options with the trial's values: of its file, or of the study, where they are drawn late."""
    if options is None:
        return None
    if options.drawn_late:
        drawn = options.draw(trial.number, trial.path.parent)
        if leads:
            trial.write_values(drawn.values())
        return drawn
    values = trial.values()
    if values is None:
        raise MisconfigurationException(f"{trial.path} has no values.json: does this node see the folder?")
    return options.with_values(values, trial.number)


def _complete(
    trial: TrialFolder, hparams: Hyperparameters | None, here: Trial, metrics: Mapping[str, float], value: float | None
) -> None:
    """The trial's last word, to the study and to its folder. On rank 0."""
    if metrics:
        trial.log(metrics, attempt=here.attempt)
    if hparams is not None and hparams.finish(trial.number, "completed", value) == "pruned":
        trial.note("pruned", attempt=here.attempt)
    trial.note("completed", attempt=here.attempt, value=value)


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


# -- signals outside of a fit --------------------------------------------------------------------------------


@contextmanager
def _signals_acted_on(trial: TrialFolder, saving: OwnSaving, here: Trial, leads: bool) -> Iterator[None]:
    """Heed the signals that say that the job's time is up, or that it has to make room. A fit takes them over.

    Where the user's own function saves, or an earlier fit has left a checkpoint, SIGUSR1 and SIGUSR2 have the job put
    back into the queue. Else they change nothing: the trial has nothing that it could go on from.
    """
    job = None if here.job is None else job_here(here.folder)
    if job is None:
        yield
        return
    busy = saved = False

    def save() -> None:
        if saving.save is not None:
            saving.save()
            if leads:
                trial.note("saved", attempt=here.attempt)

    def act(number: int) -> None:
        nonlocal busy, saved
        if busy:  # schedulers send signals twice
            return
        if number != SIGTERM and saving.save is None and not job.check().get("saved"):
            return
        busy = True
        if number == SIGTERM:
            if not saved:
                save()
                await_end()  # had it ended by itself, its job would be complete, or failed
            end_at_once()
        save()
        saved = True
        if leads:
            with by_default(SIGTERM):
                refused = job.requeue()
                if not refused:
                    await_end()
            log.warning("lockstep: the trial is saved, and goes on, for its job was not requeued: %s", refused)
            saved = False
        busy = False

    with handling((SIGUSR1, SIGUSR2, SIGTERM), act, gives_way=True):
        yield
