"""Counting of batches in a run that resumes on a different number of ranks.

Flags that count batches still count batches of the planned number of ranks. A checkpoint keeps the plan (`BatchPlan`).
A resumed attempt of the run computes the numbers that it counts by (`count_batches`) and reports to the user what has
changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.data.partition import Position, WindowPlan
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

Accumulation = int | dict[int, int]
"""Value of ``accumulate_grad_batches``: a number, or a dict from the first epoch to the number from there on."""


def batches_of_window(accumulate: Accumulation, epoch: int) -> int:
    """Return the value of ``accumulate_grad_batches`` for an epoch. Epochs are counted from 0."""
    if isinstance(accumulate, int):
        return accumulate
    due = [first for first in accumulate if first <= epoch]
    return accumulate[max(due)] if due else 1


@dataclass(frozen=True)
class ResumePoint:
    """A point within an epoch: how many micro-batches and planned batches precede it, and which data has been drawn."""

    epoch: int
    number: int
    """Micro-batches before it, by the count of this attempt."""
    rows: int
    """Batches of the plan before it."""
    position: Position = None
    """Data drawn before it; see `LoaderSource.position`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for a checkpoint."""
        return {"epoch": self.epoch, "number": self.number, "rows": self.rows, "place": self.position}

    @classmethod
    def load(cls, state: dict[str, Any]) -> ResumePoint:
        """Create a resume point from the result of :meth:`state_dict`.

        Raises:
            ValueError: a number is not a non-negative integer.
        """
        _check_counts(state, ("epoch", "number", "rows"), least=0)
        return cls(state["epoch"], state["number"], state["rows"], state["place"])


def _check_counts(state: dict[str, Any], names: tuple[str, ...], least: int) -> None:
    for name in names:
        if not isinstance(state[name], int) or state[name] < least:
            raise ValueError(f"{name} is {state[name]!r:.50}, but must be an integer of at least {least}")


IN_ORDER = "in order"
"""The `LoaderOrder.kind` of loaders that do not shuffle. If their data set grows, it still starts with the same
samples."""


class LoaderOrder(NamedTuple):
    """Description of the order in which a loader yields its samples."""

    kind: str
    """Its name in messages: shuffled, in order, and so on."""
    samples: int = -1
    """Positions of a pass on all ranks; -1 if unknown, or if each rank has its own."""
    workers: int = 0
    """Workers that read a stream in parallel; 0 for other loaders, whose order does not depend on workers."""

    @classmethod
    def load(cls, state: object) -> LoaderOrder:
        """Create a `LoaderOrder` from the list that a checkpoint stores.

        Raises:
            ValueError: the value does not describe an order.
        """
        match state:
            case [str(kind), int(samples), int(workers)]:
                return cls(kind, samples, workers)
        raise ValueError(f"the order of a loader is {state!r:.50}, but must be [kind, samples, workers]")

    def change(self, before: LoaderOrder) -> str:
        """Describe how this order differs from ``before``. Return "" if each position still has the same sample."""
        if self.kind != before.kind:
            return f"{self.kind} instead of {before.kind}"
        if self.workers != before.workers:
            return f"read by {_counted(self.workers, 'worker')} instead of {before.workers}"
        known = self.samples >= 0 and before.samples >= 0 and self.kind != IN_ORDER and not self.workers
        return f"{self.samples} instead of {before.samples}" if known and self.samples != before.samples else ""


@dataclass(frozen=True)
class BatchPlan:
    """Plan of the batches of a run, and progress of the attempt that saved it. A checkpoint stores both."""

    ranks: int
    """The number of ranks that ``accumulate_grad_batches`` and ``batch_size`` were chosen for."""
    accumulate: Accumulation
    batches: list[int]
    """``batch_size`` of each loader."""
    size: int
    """The number of ranks of the attempt that saved it."""
    at: ResumePoint
    """The last boundary, by the counts of that attempt."""
    resumed_at: ResumePoint | None = None
    """The start of that attempt, if it was in the same epoch."""
    by_process: bool | None = None
    """True if the order was drawn by the generators of one process; None if the checkpoint does not record it."""
    orders: list[LoaderOrder] | None = None
    """The order of each loader; None if the checkpoint does not record them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the fields as a dict for a checkpoint."""
        origin = None if self.resumed_at is None else self.resumed_at.state_dict()
        named = {name: getattr(self, name) for name in ("ranks", "accumulate", "batches", "size", "by_process")}
        orders = None if self.orders is None else list(map(list, self.orders))
        # The keys are those of existing checkpoints, so they differ from the fields' names.
        return {**named, "at": self.at.state_dict(), "origin": origin, "orders": orders}

    @classmethod
    def load(cls, state: dict[str, Any]) -> BatchPlan:
        """Create a plan from the result of :meth:`state_dict`.

        Raises:
            ValueError: a number is out of range.
        """
        _check_counts(state, ("ranks", "size"), least=1)
        batches, origin = state["batches"], state["origin"]
        if not isinstance(batches, list) or not all(isinstance(each, int) for each in batches):
            raise ValueError(f"batches is {batches!r:.50}, not a list of numbers")
        at, resumed_at = ResumePoint.load(state["at"]), None if origin is None else ResumePoint.load(origin)
        drawn, orders = state.get("by_process"), state.get("orders")
        known = None if orders is None else list(map(LoaderOrder.load, orders))
        return cls(state["ranks"], state["accumulate"], batches, state["size"], at, resumed_at, drawn, known)

    @property
    def workers(self) -> int | None:
        """Number of loader workers per rank that have read the stream so far; None if no stream is read."""
        position = self.at.position
        return position[-1][1] if isinstance(position, list) and position else None


@dataclass(frozen=True)
class BatchCounting:
    """Converter between counts of micro-batches and of planned batches, for the current attempt of a run.

    Created by :func:`count_batches`.

    A **row** is a batch of the plan: ``batch_size`` samples on each of ``ranks`` ranks. Flags and schedulers that
    count batches count rows. A window is ``accumulate_grad_batches`` rows; ``size`` ranks share it out over as many
    micro-batches as needed.
    """

    ranks: int
    size: int
    resumed_at: ResumePoint | None = None
    moved: bool = False
    """True if an attempt with other ranks or batches stopped at ``resumed_at`` (or between two epochs)."""
    message: str = ""
    """Message to the user about such a change."""
    is_warning: bool = field(default=False, compare=False)
    """True if a step has a different number of samples from that attempt, or a stream a different number of workers."""

    def report(self) -> None:
        """Inform the user if this attempt counts batches differently from the previous attempt."""
        if self.moved:
            (rank_zero_warn if self.is_warning else rank_zero_info)(self.message)

    @property
    def resumed_number(self) -> int | None:
        """Number of micro-batches that precede this attempt in its first epoch; None if it starts a new epoch."""
        return None if self.resumed_at is None else self.resumed_at.number

    @property
    def is_replanned(self) -> bool:
        """True if this attempt's number of ranks differs from the plan's."""
        return self.ranks != self.size

    def micro(self, accumulate: int) -> int:
        """Return the number of micro-batches in a window of ``accumulate`` planned batches."""
        return -(-accumulate * self.ranks // self.size)

    def batches(self, rows: int | float, accumulate: int) -> int | float:
        """Return the number of micro-batches in an epoch of ``rows`` planned batches."""
        if math.isinf(rows):
            return rows
        windows, more = divmod(int(rows), accumulate)
        return windows * self.micro(accumulate) + self.micro(more)

    def done_before(self, epoch: int) -> tuple[int, int]:
        """Return the numbers of (micro-batches, planned batches) of an epoch that earlier attempts have finished."""
        point = self.resumed_at
        return (0, 0) if point is None or point.epoch != epoch else (point.number, point.rows)

    def rows(self, epoch: int, number: int, accumulate: int) -> int:
        """Return the number of planned batches that the first ``number`` micro-batches of an epoch complete.

        The result is exact at the end of a window.
        """
        first, rows = self.done_before(epoch)
        windows, more = divmod(number - first, self.micro(accumulate))
        return rows + windows * accumulate + more * accumulate // self.micro(accumulate)

    def window_plan(self, epoch: int, accumulate: int, limit: int | float) -> WindowPlan | None:
        """Return the plan that divides an epoch into windows; None if the current ranks and loaders determine them."""
        point = self.resumed_at
        if point is not None and point.epoch == epoch:
            return WindowPlan(self.ranks, accumulate, limit, point.number, point.position)
        return WindowPlan(self.ranks, accumulate, limit) if self.is_replanned else None


@dataclass(frozen=True)
class RunAttempt:
    """Properties of an attempt of a run that determine how it counts batches."""

    size: int
    accumulate: Accumulation
    batches: list[int]
    flexible: bool
    """True if the loaders can be divided into windows of any size."""
    automatic: bool = True
    """True if lockstep forms the windows (automatic optimization), not the user."""
    keep: bool = True
    """``Trainer(keep_global_batch=...)``."""
    workers: int | None = None
    """Number of loader workers per rank for a stream that lockstep splits among the ranks; None if there is no such
    stream."""


def count_batches(saved: BatchPlan | None, attempt: RunAttempt) -> BatchCounting:
    """Return the `BatchCounting` of an attempt that resumes from the plan ``saved``, without side effects.

    The plan is kept if only the number of ranks has changed. If the user has changed ``batch_size`` or
    ``accumulate_grad_batches``, the new values apply from the last boundary on. A stream that is read by a different
    number of loader workers is handled like a different number of ranks.

    Raises:
        MisconfigurationException: the windows of the plan cannot be divided evenly over the current ranks.
    """
    if saved is None:
        return BatchCounting(attempt.size, attempt.size)
    as_planned = _table(attempt.accumulate) == _table(saved.accumulate) and attempt.batches == saved.batches
    # In manual optimization lockstep cannot accumulate for the user: a batch of the plan must fit into a micro-batch.
    can_step = saved.ranks == attempt.size or (attempt.flexible and saved.ranks < attempt.size)
    planned = as_planned and (attempt.keep or saved.ranks == attempt.size) and (attempt.automatic or can_step)
    ranks = saved.ranks if planned else attempt.size
    if saved.size == attempt.size and planned and not _has_other_workers(saved, attempt):
        return BatchCounting(ranks, attempt.size, saved.resumed_at)
    if planned and not attempt.flexible:
        _check_divides(saved, attempt)
    made = BatchCounting(ranks, attempt.size)
    message, is_warning = _changes(saved, attempt, made, as_planned, planned)
    return BatchCounting(ranks, attempt.size, _resume_point(saved, attempt, made), True, message, is_warning)


def _changes(
    saved: BatchPlan, attempt: RunAttempt, made: BatchCounting, as_planned: bool, planned: bool
) -> tuple[str, bool]:
    """Return (message about how batches are counted differently than in ``saved``, True if it is a warning)."""
    epoch = saved.at.epoch
    before = StepSize(saved.ranks, batches_of_window(saved.accumulate, epoch), saved.batches)
    now = StepSize(made.ranks, batches_of_window(attempt.accumulate, epoch), attempt.batches)
    message = _plan_holds(before, made) if planned else _users_hold(before, now, attempt, as_planned)
    if not _has_other_workers(saved, attempt):
        return message, before.samples != now.samples
    workers = (
        f"trainer.fit: the iterable data set is read by {attempt.workers} worker(s) per rank, but the "
        f"checkpoint was saved with {saved.workers}. The stream of this epoch is read again, and samples that were "
        "already drawn are skipped. If the data set shards itself over its workers "
        "(`torch.utils.data.get_worker_info`), some samples are seen twice and others never: resume such a data set "
        "with the former num_workers."
    )
    return (workers if planned and saved.size == attempt.size else f"{message} {workers}"), True


def _table(flag: Accumulation) -> dict[int, int]:
    """Convert ``accumulate_grad_batches`` to a dict {epoch at which the value changes: new value}."""
    # A dict may start after epoch 0; until then a window has one batch.
    table = {0: 1, **flag} if isinstance(flag, dict) else {0: flag}
    return {epoch: table[epoch] for epoch in table if epoch == 0 or table[epoch] != batches_of_window(table, epoch - 1)}


def _has_other_workers(saved: BatchPlan, attempt: RunAttempt) -> bool:
    """Return True if the number of loader workers that read a stream has changed since the checkpoint was saved."""
    return saved.workers is not None and attempt.workers not in (None, saved.workers)


def _resume_point(saved: BatchPlan, attempt: RunAttempt, made: BatchCounting) -> ResumePoint | None:
    """Convert the last boundary in ``saved`` to the counts of this attempt. Return None at the start of an epoch."""
    at = saved.at
    if at.rows == 0:
        return None
    accumulate = batches_of_window(attempt.accumulate, at.epoch)
    if made.ranks == saved.ranks and attempt.batches == saved.batches:
        windows, more = divmod(at.rows, accumulate)
        number = windows * made.micro(accumulate) + more * saved.ranks // attempt.size
        return ResumePoint(at.epoch, number, at.rows, at.position)
    # With another batch_size the rows that are done are converted by their samples.
    before = saved.ranks * max(saved.batches, default=1)
    number = at.rows * before // (attempt.size * max(attempt.batches, default=1))
    return ResumePoint(at.epoch, number, number, at.position)


def _check_divides(saved: BatchPlan, attempt: RunAttempt) -> None:
    flag, epoch = saved.accumulate, saved.at.epoch
    values = {batches_of_window(flag, epoch)}
    if isinstance(flag, dict):
        # Later windows are checked now, too: better an error at the start than in a later epoch.
        values |= {value for first, value in flag.items() if first >= epoch}
    for value in sorted(values):
        whole = value * saved.ranks
        if whole % attempt.size == 0:
            continue
        fitting = [str(ranks) for ranks in range(1, whole + 1) if whole % ranks == 0]
        some = ", ".join(fitting[:8]) + (", ..." if len(fitting) > 8 else "")
        raise MisconfigurationException(
            f"The {whole} batches of a step ({saved.ranks} ranks x accumulate_grad_batches={value}) cannot be divided "
            f"evenly over {attempt.size} ranks, and the loader yields ready-made batches, which cannot be split. "
            f"Resume with devices x num_nodes equal to one of {some}; change accumulate_grad_batches or batch_size; "
            "or set Trainer(keep_global_batch=False) to continue with a different global batch."
        )


# -- messages --------------------------------------------------------------------------------------------


class StepSize(NamedTuple):
    """Factors of the number of samples in an optimizer step. If loaders differ, the largest ``batch_size`` counts."""

    ranks: int
    accumulate: int
    batches: list[int]

    @property
    def samples(self) -> int:
        """Number of samples that all ranks together draw for an optimizer step."""
        return self.ranks * self.accumulate * max(self.batches, default=1)

    def __str__(self) -> str:
        ranks = _counted(self.ranks, "rank")
        if set(self.batches) == {1}:  # loaders that are taken as they are, perhaps
            return f"{ranks} x accumulate_grad_batches={self.accumulate} = {self.samples} a step"
        return (
            f"{ranks} x batch_size={max(self.batches, default=1)} x accumulate_grad_batches={self.accumulate} = "
            f"{self.samples} samples a step"
        )


def _counted(number: int, what: str) -> str:
    """Format a number and a noun as text, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _plan_holds(before: StepSize, made: BatchCounting) -> str:
    if not made.is_replanned:
        return f"trainer.fit: the run continues on the ranks that it was planned for: {before}."
    micro = made.micro(before.accumulate)
    each, more = divmod(before.samples, micro * made.size)
    parts = f"{each} to {each + 1}" if more else str(each)
    return (
        f"trainer.fit: the run was planned as {before}. On {_counted(made.size, 'rank')} each step keeps its samples, "
        f"as {micro} micro-batch{'' if micro == 1 else 'es'} of {parts} on each rank. Flags that count batches still "
        f"count batches of {_counted(before.ranks, 'rank')}."
    )


def _users_hold(before: StepSize, now: StepSize, attempt: RunAttempt, as_planned: bool) -> str:
    same = "the same" if before.samples == now.samples else "a different"
    if not as_planned:
        why = "batch_size or accumulate_grad_batches was changed, and the new value applies from now on"
    elif not attempt.keep:
        why = "keep_global_batch=False"
    else:
        why = (
            "in manual optimization lockstep cannot accumulate for `training_step`; change batch_size or step less "
            "often to keep the global batch"
        )
    return f"trainer.fit: the checkpoint was saved with {before}; this run has {now}, {same} global batch ({why})."
