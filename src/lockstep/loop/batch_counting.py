"""How a run counts batches, whatever number of ranks it goes on with: by those of the ranks that planned it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.cut import Position, WindowPlan
from lockstep.ground.errors import MisconfigurationException

Accumulation = int | dict[int, int]  # as of `Trainer(accumulate_grad_batches=...)`


@dataclass(frozen=True)
class ResumePoint:
    """Where, in the middle of an epoch, a life of the run began."""

    epoch: int
    number: int
    """Micro-batches that come before it, by the count of this life."""
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
        for name in ("epoch", "number", "rows"):
            if not isinstance(state[name], int) or state[name] < 0:
                raise ValueError(f"{name} is {state[name]!r:.50}")
        return cls(state["epoch"], state["number"], state["rows"], state["place"])


@dataclass(frozen=True)
class Plan:
    """What the batches of a run are, and how far this life of it has come: what a checkpoint keeps."""

    ranks: int
    """The number of ranks that ``accumulate_grad_batches`` and ``batch_size`` were meant for."""
    accumulate: Accumulation
    batches: list[int]
    """``batch_size`` of each loader."""
    size: int
    """The number of ranks of the life that saved it."""
    at: ResumePoint
    """The last boundary, by the counts of that life."""
    resumed_at: ResumePoint | None = None
    """Where that life had begun, if that was in the same epoch."""

    def state_dict(self) -> dict[str, Any]:
        """As a plain dict."""
        origin = None if self.resumed_at is None else self.resumed_at.state_dict()
        named = {name: getattr(self, name) for name in ("ranks", "accumulate", "batches", "size")}
        return {**named, "at": self.at.state_dict(), "origin": origin}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Plan:
        """From :meth:`state_dict`.

        Raises:
            ValueError: it has numbers that cannot be.
        """
        for name in ("ranks", "size"):
            if not isinstance(state[name], int) or state[name] < 1:
                raise ValueError(f"{name} is {state[name]!r:.50}")
        batches, origin = state["batches"], state["origin"]
        if not isinstance(batches, list) or not all(isinstance(each, int) for each in batches):
            raise ValueError(f"batches is {batches!r:.50}")
        at, resumed_at = ResumePoint.load(state["at"]), None if origin is None else ResumePoint.load(origin)
        return cls(state["ranks"], state["accumulate"], batches, state["size"], at, resumed_at)


@dataclass(frozen=True)
class BatchCounting:
    """By what this life of a run counts, and where it began. Made by :func:`count_batches`.

    A **row** is a batch of the plan: ``batch_size`` samples on each of ``ranks`` ranks. What flags and schedulers
    count in batches, they count in rows; ``accumulate_grad_batches`` rows are a window, which ``size`` ranks share
    out over as many micro-batches as it takes.
    """

    ranks: int
    size: int
    resumed_at: ResumePoint | None = None
    moved: bool = False
    """Whether another life, with other ranks or batches, left off at ``resumed_at`` (or between two epochs)."""
    said: str = ""
    """What the user is told about it."""
    differs: bool = field(default=False, compare=False)
    """Whether a step has another number of samples than it had in that life."""

    @property
    def elastic(self) -> bool:
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
        """(micro-batches, rows) of an epoch that come before this life."""
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
        return WindowPlan(self.ranks, accumulate, limit) if self.elastic else None


@dataclass(frozen=True)
class Given:
    """What this life is given: its ranks, its flags and its loaders."""

    size: int
    accumulate: Accumulation
    batches: list[int]
    flexible: bool
    """Whether the loaders can be cut into windows of any size."""
    automatic: bool = True
    """Whether windows are lockstep's (automatic optimization) and not the user's."""
    keep: bool = True
    """``Trainer(keep_global_batch=...)``."""


def count_batches(saved: Plan | None, given: Given) -> BatchCounting:
    """By what a run counts that goes on from ``saved``; pure.

    The plan holds where only the number of ranks has changed. Where the user has changed ``batch_size`` or
    ``accumulate_grad_batches``, theirs hold from the last boundary on.

    Raises:
        MisconfigurationException: the plan's windows cannot be shared out over these ranks.
    """
    if saved is None:
        return BatchCounting(given.size, given.size)
    as_planned = _table(given.accumulate) == _table(saved.accumulate) and given.batches == saved.batches
    planned = as_planned and (given.keep or saved.ranks == given.size) and _can_step(saved, given)
    ranks = saved.ranks if planned else given.size
    if saved.size == given.size and planned:
        return BatchCounting(ranks, given.size, saved.resumed_at)
    if planned and not given.flexible:
        _check_divides(saved, given)
    made = BatchCounting(ranks, given.size)
    before, now = _samples(saved.ranks, saved.accumulate, saved), _samples(ranks, given.accumulate, saved, given)
    differs = before != now
    said = _plan_holds(saved, given, made) if planned else _users_hold(saved, given, as_planned, before, now)
    return BatchCounting(ranks, given.size, _resume_point(saved, given, made), True, said, differs)


def accumulation(flag: Accumulation, epoch: int) -> int:
    """Batches of a window in an epoch, counted from 0."""
    if isinstance(flag, int):
        return flag
    due = [first for first in flag if first <= epoch]
    return flag[max(due)] if due else 1


def _table(flag: Accumulation) -> dict[int, int]:
    """The epochs from which on another number holds, and that number."""
    table = {0: 1, **flag} if isinstance(flag, dict) else {0: flag}
    return {epoch: table[epoch] for epoch in table if epoch == 0 or table[epoch] != accumulation(table, epoch - 1)}


def _can_step(saved: Plan, given: Given) -> bool:
    """Manual optimization: whether a row is one micro-batch, for nobody but the user can accumulate."""
    return given.automatic or (saved.ranks <= given.size and (given.flexible or saved.ranks == given.size))


def _resume_point(saved: Plan, given: Given, made: BatchCounting) -> ResumePoint | None:
    """Where the last boundary of ``saved`` is, by the counts of this life; None: it is the beginning of an epoch."""
    at = saved.at
    if at.rows == 0:
        return None
    accumulate = accumulation(given.accumulate, at.epoch)
    if made.ranks == saved.ranks and given.batches == saved.batches:
        windows, more = divmod(at.rows, accumulate)
        number = windows * made.micro(accumulate) + more * saved.ranks // given.size
        return ResumePoint(at.epoch, number, at.rows, at.position)
    before = saved.ranks * max(saved.batches, default=1)
    number = at.rows * before // (given.size * max(given.batches, default=1))
    return ResumePoint(at.epoch, number, number, at.position)


def _check_divides(saved: Plan, given: Given) -> None:
    flag, epoch = saved.accumulate, saved.at.epoch
    values = {accumulation(flag, epoch)}
    if isinstance(flag, dict):
        values |= {value for first, value in flag.items() if first >= epoch}
    for value in sorted(values):
        whole = value * saved.ranks
        if whole % given.size == 0:
            continue
        fitting = [str(ranks) for ranks in range(1, whole + 1) if whole % ranks == 0]
        some = ", ".join(fitting[:8]) + (", ..." if len(fitting) > 8 else "")
        raise MisconfigurationException(
            f"This run steps after {whole} batches ({saved.ranks} ranks x accumulate_grad_batches={value}), which do "
            f"not divide by its {given.size} ranks now. A loader that lockstep does not share out itself, or over an "
            "iterable data set of single samples, gives whole batches only. Resume with devices x num_nodes equal to "
            f"one of {some}; or say what a step is to have from here on, by another accumulate_grad_batches or "
            "batch_size, or by Trainer(keep_global_batch=False), which leaves both as they are."
        )


# -- what is said ----------------------------------------------------------------------------------------


def _samples(ranks: int, flag: Accumulation, saved: Plan, given: Given | None = None) -> int:
    """Samples of a step in the epoch of the checkpoint, by the loader that has most."""
    batches = saved.batches if given is None else given.batches
    return ranks * accumulation(flag, saved.at.epoch) * max(batches, default=1)


def _step(ranks: int, flag: Accumulation, batches: list[int], epoch: int) -> str:
    """What a step is made of."""
    accumulate, size = accumulation(flag, epoch), max(batches, default=1)
    total = ranks * accumulate * size
    plural = "" if ranks == 1 else "s"
    if set(batches) == {1}:  # loaders that are taken as they are, perhaps
        return f"{ranks} rank{plural} x accumulate_grad_batches={accumulate} = {total} a step"
    return f"{ranks} rank{plural} x batch_size={size} x accumulate_grad_batches={accumulate} = {total} samples a step"


def _plan_holds(saved: Plan, given: Given, made: BatchCounting) -> str:
    epoch, size = saved.at.epoch, given.size
    accumulate, batch = accumulation(saved.accumulate, epoch), max(saved.batches, default=1)
    was = _step(saved.ranks, saved.accumulate, saved.batches, epoch)
    if not made.elastic:
        return f"trainer.fit: the run goes on with the ranks that it was planned for: {was}."
    micro, window = made.micro(accumulate), accumulate * saved.ranks * batch
    each, more = divmod(window, micro * size)
    parts = f"{each} to {each + 1}" if more else str(each)
    return (
        f"trainer.fit: the run was planned as {was}. On {size} rank{'' if size == 1 else 's'} each step is the same, "
        f"as {micro} micro-batch{'' if micro == 1 else 'es'} of {parts} on each rank; flags that count batches go on "
        f"counting those of {saved.ranks} rank{'' if saved.ranks == 1 else 's'}."
    )


def _users_hold(saved: Plan, given: Given, as_planned: bool, before: int, now: int) -> str:
    epoch = saved.at.epoch
    was = _step(saved.ranks, saved.accumulate, saved.batches, epoch)
    new = _step(given.size, given.accumulate, given.batches, epoch)
    same = "the same" if before == now else "another"
    if not as_planned:
        why = "batch_size or accumulate_grad_batches is not that of the checkpoint, and holds from here on"
    elif not given.keep:
        why = "keep_global_batch=False"
    else:
        why = (
            "in manual optimization a step is what `training_step` makes it, and lockstep cannot accumulate for it; "
            "give another batch_size or step less often to have the same"
        )
    return f"trainer.fit: the checkpoint has {was}; now it is {new}, {same} global batch ({why})."
