"""By what a run counts its batches: by the ranks that planned it, whatever number of ranks it goes on with.

A checkpoint keeps the plan (`BatchPlan`). An attempt of the run that goes on from it finds out by which numbers it
counts (`count_batches`) and tells the user what has changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.data.cut import Position, WindowPlan
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

Accumulation = int | dict[int, int]
"""As of ``accumulate_grad_batches``: a number, or the epochs from which on each holds."""


def batches_of_window(accumulate: Accumulation, epoch: int) -> int:
    """Batches of a window in an epoch, counted from 0."""
    if isinstance(accumulate, int):
        return accumulate
    due = [first for first in accumulate if first <= epoch]
    return accumulate[max(due)] if due else 1


@dataclass(frozen=True)
class ResumePoint:
    """Where, in the middle of an epoch, an attempt of the run began."""

    epoch: int
    number: int
    """Micro-batches that come before it, by the count of this attempt."""
    rows: int
    """Batches of the plan that come before it."""
    position: Position = None
    """What was drawn before it, as `Source.position` tells."""

    def state_dict(self) -> dict[str, Any]:
        """As a plain dict."""
        return {"epoch": self.epoch, "number": self.number, "rows": self.rows, "place": self.position}

    @classmethod
    def load(cls, state: dict[str, Any]) -> ResumePoint:
        """From :meth:`state_dict`.

        Raises:
            ValueError: it has numbers that cannot be.
        """
        _check_counts(state, ("epoch", "number", "rows"), least=0)
        return cls(state["epoch"], state["number"], state["rows"], state["place"])


def _check_counts(state: dict[str, Any], names: tuple[str, ...], least: int) -> None:
    for name in names:
        if not isinstance(state[name], int) or state[name] < least:
            raise ValueError(f"{name} is {state[name]!r:.50}")


IN_ORDER = "in order"
"""The kind of a loader that does not shuffle: of a longer data set, too, it gives the same samples first."""


class LoaderOrder(NamedTuple):
    """In which order a loader gives its samples."""

    kind: str
    """As messages say it: shuffled, in order, and the like."""
    samples: int = -1
    """Positions of a pass on all ranks; -1: not known, or a rank's own."""
    workers: int = 0
    """That read a stream at once; 0 of other loaders, whose order does not depend on them."""

    @classmethod
    def load(cls, state: object) -> LoaderOrder:
        """From a list.

        Raises:
            ValueError: it is none of an order.
        """
        match state:
            case [str(kind), int(samples), int(workers)]:
                return cls(kind, samples, workers)
        raise ValueError(f"an order is {state!r:.50}")

    def change(self, before: LoaderOrder) -> str:
        """What of another order has become of ``before``; empty where positions are the samples that they were."""
        if self.kind != before.kind:
            return f"{self.kind}, before {before.kind}"
        if self.workers != before.workers:
            return f"read by {_counted(self.workers, 'worker')}, before by {before.workers}"
        known = self.samples >= 0 and before.samples >= 0 and self.kind != IN_ORDER and not self.workers
        return f"{self.samples}, before {before.samples}" if known and self.samples != before.samples else ""


@dataclass(frozen=True)
class BatchPlan:
    """What the batches of a run are, and how far this attempt of it has come: what a checkpoint keeps."""

    ranks: int
    """The number of ranks that ``accumulate_grad_batches`` and ``batch_size`` were meant for."""
    accumulate: Accumulation
    batches: list[int]
    """``batch_size`` of each loader."""
    size: int
    """The number of ranks of the attempt that saved it."""
    at: ResumePoint
    """The last boundary, by the counts of that attempt."""
    resumed_at: ResumePoint | None = None
    """Where that attempt had begun, if that was in the same epoch."""
    by_process: bool | None = None
    """Whether the order was drawn by the generators of one process; None: a checkpoint that does not tell."""
    orders: list[LoaderOrder] | None = None
    """Of each loader; None: a checkpoint that does not tell."""

    def state_dict(self) -> dict[str, Any]:
        """As a plain dict."""
        origin = None if self.resumed_at is None else self.resumed_at.state_dict()
        named = {name: getattr(self, name) for name in ("ranks", "accumulate", "batches", "size", "by_process")}
        orders = None if self.orders is None else list(map(list, self.orders))
        return {**named, "at": self.at.state_dict(), "origin": origin, "orders": orders}

    @classmethod
    def load(cls, state: dict[str, Any]) -> BatchPlan:
        """From :meth:`state_dict`.

        Raises:
            ValueError: it has numbers that cannot be.
        """
        _check_counts(state, ("ranks", "size"), least=1)
        batches, origin = state["batches"], state["origin"]
        if not isinstance(batches, list) or not all(isinstance(each, int) for each in batches):
            raise ValueError(f"batches is {batches!r:.50}")
        at, resumed_at = ResumePoint.load(state["at"]), None if origin is None else ResumePoint.load(origin)
        drawn, orders = state.get("by_process"), state.get("orders")
        known = None if orders is None else list(map(LoaderOrder.load, orders))
        return cls(state["ranks"], state["accumulate"], batches, state["size"], at, resumed_at, drawn, known)

    @property
    def workers(self) -> int | None:
        """The loader workers of each rank that read a stream up to the last boundary; None of other loaders."""
        position = self.at.position
        return position[-1][1] if isinstance(position, list) and position else None


@dataclass(frozen=True)
class BatchCounting:
    """By what this attempt of a run counts, and where it began. Made by :func:`count_batches`.

    A **row** is a batch of the plan: ``batch_size`` samples on each of ``ranks`` ranks. What flags and schedulers
    count in batches, they count in rows; ``accumulate_grad_batches`` rows are a window, which ``size`` ranks share
    out over as many micro-batches as it takes.
    """

    ranks: int
    size: int
    resumed_at: ResumePoint | None = None
    moved: bool = False
    """Whether another attempt, with other ranks or batches, left off at ``resumed_at`` (or between two epochs)."""
    said: str = ""
    """What the user is told about it."""
    differs: bool = field(default=False, compare=False)
    """Whether a step has another number of samples than it had in that attempt, or a stream other workers."""

    def tell(self) -> None:
        """Tell the user that this attempt counts otherwise than the one that left off."""
        if self.moved:
            (rank_zero_warn if self.differs else rank_zero_info)(self.said)

    @property
    def resumed_number(self) -> int | None:
        """Micro-batches of the epoch before this attempt, if it began within one."""
        return None if self.resumed_at is None else self.resumed_at.number

    @property
    def is_replanned(self) -> bool:
        """Whether rows are shared out over another number of ranks than they were planned for."""
        return self.ranks != self.size

    def micro(self, accumulate: int) -> int:
        """Micro-batches of a window of so many rows."""
        return -(-accumulate * self.ranks // self.size)

    def batches(self, rows: int | float, accumulate: int) -> int | float:
        """Micro-batches of an epoch of so many rows."""
        if math.isinf(rows):
            return rows
        windows, more = divmod(int(rows), accumulate)
        return windows * self.micro(accumulate) + self.micro(more)

    def begins(self, epoch: int) -> tuple[int, int]:
        """(micro-batches, rows) of an epoch that come before this attempt."""
        point = self.resumed_at
        return (0, 0) if point is None or point.epoch != epoch else (point.number, point.rows)

    def rows(self, epoch: int, number: int, accumulate: int) -> int:
        """Rows of an epoch that are done after so many micro-batches of it; exact where a window ends."""
        first, rows = self.begins(epoch)
        windows, more = divmod(number - first, self.micro(accumulate))
        return rows + windows * accumulate + more * accumulate // self.micro(accumulate)

    def window_plan(self, epoch: int, accumulate: int, limit: int | float) -> WindowPlan | None:
        """How an epoch is to be cut; None: as the loaders and the ranks at hand do it."""
        point = self.resumed_at
        if point is not None and point.epoch == epoch:
            return WindowPlan(self.ranks, accumulate, limit, point.number, point.position)
        return WindowPlan(self.ranks, accumulate, limit) if self.is_replanned else None


@dataclass(frozen=True)
class RunAttempt:
    """An attempt of a run: its ranks, its flags and its loaders."""

    size: int
    accumulate: Accumulation
    batches: list[int]
    flexible: bool
    """Whether the loaders can be cut into windows of any size."""
    automatic: bool = True
    """Whether windows are lockstep's (automatic optimization) and not the user's."""
    keep: bool = True
    """``Trainer(keep_global_batch=...)``."""
    workers: int | None = None
    """Loader workers of each rank that read a stream that lockstep shares out; None of other loaders."""


def count_batches(saved: BatchPlan | None, attempt: RunAttempt) -> BatchCounting:
    """By what a run counts that goes on from ``saved``; pure.

    The plan holds where only the number of ranks has changed. Where the user has changed ``batch_size`` or
    ``accumulate_grad_batches``, theirs hold from the last boundary on. A stream that other loader workers read
    is moved as to other ranks.

    Raises:
        MisconfigurationException: the plan's windows cannot be shared out over these ranks.
    """
    if saved is None:
        return BatchCounting(attempt.size, attempt.size)
    as_planned = _table(attempt.accumulate) == _table(saved.accumulate) and attempt.batches == saved.batches
    planned = as_planned and (attempt.keep or saved.ranks == attempt.size) and _can_step(saved, attempt)
    ranks = saved.ranks if planned else attempt.size
    if saved.size == attempt.size and planned and not _has_other_workers(saved, attempt):
        return BatchCounting(ranks, attempt.size, saved.resumed_at)
    if planned and not attempt.flexible:
        _check_divides(saved, attempt)
    made = BatchCounting(ranks, attempt.size)
    said, differs = _changes(saved, attempt, made, as_planned, planned)
    return BatchCounting(ranks, attempt.size, _resume_point(saved, attempt, made), True, said, differs)


def _changes(
    saved: BatchPlan, attempt: RunAttempt, made: BatchCounting, as_planned: bool, planned: bool
) -> tuple[str, bool]:
    """What the user is told about an attempt that does not go on as the one before, and whether it is a warning."""
    epoch = saved.at.epoch
    before = StepSize(saved.ranks, batches_of_window(saved.accumulate, epoch), saved.batches)
    now = StepSize(made.ranks, batches_of_window(attempt.accumulate, epoch), attempt.batches)
    told = [_plan_holds(before, made) if planned else _users_hold(before, now, attempt, as_planned)]
    if not _has_other_workers(saved, attempt):
        return told[0], before.samples != now.samples
    if planned and saved.size == attempt.size:
        told = []
    return " ".join([*told, _other_workers(saved, attempt)]), True


def _table(flag: Accumulation) -> dict[int, int]:
    """The epochs from which on another number holds, and that number."""
    table = {0: 1, **flag} if isinstance(flag, dict) else {0: flag}
    return {epoch: table[epoch] for epoch in table if epoch == 0 or table[epoch] != batches_of_window(table, epoch - 1)}


def _has_other_workers(saved: BatchPlan, attempt: RunAttempt) -> bool:
    """Whether a stream is shared out otherwise, by its loader's workers, than the epoch under way has begun."""
    return saved.workers is not None and attempt.workers not in (None, saved.workers)


def _can_step(saved: BatchPlan, attempt: RunAttempt) -> bool:
    """Manual optimization: whether a row is one micro-batch, for nobody but the user can accumulate."""
    return attempt.automatic or (saved.ranks <= attempt.size and (attempt.flexible or saved.ranks == attempt.size))


def _resume_point(saved: BatchPlan, attempt: RunAttempt, made: BatchCounting) -> ResumePoint | None:
    """Where the last boundary of ``saved`` is, by the counts of this attempt; None: it is the beginning of an epoch."""
    at = saved.at
    if at.rows == 0:
        return None
    accumulate = batches_of_window(attempt.accumulate, at.epoch)
    if made.ranks == saved.ranks and attempt.batches == saved.batches:
        windows, more = divmod(at.rows, accumulate)
        number = windows * made.micro(accumulate) + more * saved.ranks // attempt.size
        return ResumePoint(at.epoch, number, at.rows, at.position)
    before = saved.ranks * max(saved.batches, default=1)
    number = at.rows * before // (attempt.size * max(attempt.batches, default=1))
    return ResumePoint(at.epoch, number, number, at.position)


def _check_divides(saved: BatchPlan, attempt: RunAttempt) -> None:
    flag, epoch = saved.accumulate, saved.at.epoch
    values = {batches_of_window(flag, epoch)}
    if isinstance(flag, dict):
        values |= {value for first, value in flag.items() if first >= epoch}
    for value in sorted(values):
        whole = value * saved.ranks
        if whole % attempt.size == 0:
            continue
        fitting = [str(ranks) for ranks in range(1, whole + 1) if whole % ranks == 0]
        some = ", ".join(fitting[:8]) + (", ..." if len(fitting) > 8 else "")
        raise MisconfigurationException(
            f"This run steps after {whole} batches ({saved.ranks} ranks x accumulate_grad_batches={value}), which do "
            f"not divide by its {attempt.size} ranks now. A loader that lockstep does not share out itself, or over an "
            "iterable data set of single samples, gives whole batches only. Resume with devices x num_nodes equal to "
            f"one of {some}; or say what a step is to have from here on, by another accumulate_grad_batches or "
            "batch_size, or by Trainer(keep_global_batch=False), which leaves both as they are."
        )


# -- what is said ----------------------------------------------------------------------------------------


class StepSize(NamedTuple):
    """What a step is made of; of several loaders the one counts that has most samples."""

    ranks: int
    accumulate: int
    batches: list[int]

    @property
    def samples(self) -> int:
        """Of all ranks."""
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
    """``1 rank``, ``2 ranks``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _plan_holds(before: StepSize, made: BatchCounting) -> str:
    if not made.is_replanned:
        return f"trainer.fit: the run goes on with the ranks that it was planned for: {before}."
    micro = made.micro(before.accumulate)
    each, more = divmod(before.samples, micro * made.size)
    parts = f"{each} to {each + 1}" if more else str(each)
    return (
        f"trainer.fit: the run was planned as {before}. On {_counted(made.size, 'rank')} each step is the same, "
        f"as {micro} micro-batch{'' if micro == 1 else 'es'} of {parts} on each rank; flags that count batches go on "
        f"counting those of {_counted(before.ranks, 'rank')}."
    )


def _other_workers(saved: BatchPlan, attempt: RunAttempt) -> str:
    return (
        f"trainer.fit: num_workers is not that of the checkpoint: each rank reads its stream by {attempt.workers} at "
        f"once, before by {saved.workers}. This epoch's stream is read again, without the samples that were drawn "
        "before. One that shards itself over its workers (`torch.utils.data.get_worker_info`) does so anew, so that "
        "some of its samples come twice and some never: resume that with the number of workers that it had."
    )


def _users_hold(before: StepSize, now: StepSize, attempt: RunAttempt, as_planned: bool) -> str:
    same = "the same" if before.samples == now.samples else "another"
    if not as_planned:
        why = "batch_size or accumulate_grad_batches is not that of the checkpoint, and holds from here on"
    elif not attempt.keep:
        why = "keep_global_batch=False"
    else:
        why = (
            "in manual optimization a step is what `training_step` makes it, and lockstep cannot accumulate for it; "
            "give another batch_size or step less often to have the same"
        )
    return f"trainer.fit: the checkpoint has {before}; now it is {now}, {same} global batch ({why})."
