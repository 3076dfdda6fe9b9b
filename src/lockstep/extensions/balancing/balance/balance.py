"""Ranks tell one another how long their steps take; with ``Trainer(balance=True)`` their shares follow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from torch import nn

from lockstep.callbacks.base import Callback
from lockstep.data.cut import apportion
from lockstep.data.feed import Feed
from lockstep.data.window import Window
from lockstep.engines.strategy import Strategy
from lockstep.extensions.balancing.balance.step_times import DeviceTimes, StepTimes
from lockstep.extensions.balancing.shares import Move, ShareControl
from lockstep.extensions.balancing.window_times import WindowTimes, typical
from lockstep.ground.comm import RowsToCome
from lockstep.ground.device import has_timed_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import free_memory, memory_held, memory_peak
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.session import Session
from lockstep.loop.step import Step

PERIOD = 8
"""Windows from one look at the ranks' times to the next."""
LEAST = 4
"""Windows of equal parts, at least, by which a look judges a rank."""
WARM_UP = 2
"""Windows at the start of a fit that no look takes in: memory is being allocated."""
UNTOLD = WindowTimes(*[math.nan] * len(WindowTimes._fields))
"""In the place of times that nobody listens for, or that a device is not through with."""
LOOKS_AT_MEMORY = 32
"""Looks from one at the free memory to the next: it takes half a millisecond."""
ROOM = 0.8
"""The part of the free memory that a larger share may fill."""

LOCAL_STEPS = ", since it takes local steps and averages the nodes' weights evenly"
ALONE = (
    "Trainer(balance=True) has no effect on one device: shares of a global batch are balanced among several "
    "(devices=2, say)."
)
NO_SAMPLES = (
    "Trainer(balance=True): a global batch has {total} samples for {size} ranks, so that no share can become smaller "
    "and another larger; give a larger batch_size."
)
BATCH_NORM = (
    "Trainer(balance=True): {name} takes its statistics over one rank's samples, and ranks have different numbers of "
    "them. Trainer(sync_batchnorm=True) takes them over the samples of all."
)


# -- what balance asks of a run -------------------------------------------------------------------------------


def _warn_of_batch_norm(session: Session) -> None:
    if session.strategy.sync_batchnorm:
        return
    for name, layer in session.module.named_modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if is_norm and "SyncBatchNorm" not in type(layer).__name__ and layer.training:
            rank_zero_warn(BATCH_NORM.format(name=f"{type(layer).__name__} {name!r}"))
            return


def check(strategy: Strategy, why: str = "") -> None:
    """Refuse ``Trainer(balance=True)`` where ranks cannot take unequal shares; one device alone has nothing to share.

    Raises:
        MisconfigurationException: with the way out.
    """
    several = strategy.world.size > 1 or strategy.drives_all_devices
    # each rank sees samples of its own, and the loop weighs the losses that the engine goes back from
    takes = strategy.replicas.count == strategy.world.size and not strategy.drives_all_devices
    takes = takes and not strategy.steps_itself and strategy.window is None
    if why or (several and not takes):
        raise MisconfigurationException(
            f"Trainer(balance=True): {type(strategy).__name__} cannot give its ranks unequal shares of a global batch"
            f'{why}. Use strategy="ddp" or "fsdp", or leave `balance` out.'
        )


def measure(session: Session, step: Step, validation: EvaluationLoop, listeners: Sequence[Callback]) -> Balance | None:
    """What measures the steps of this fit; None where nobody listens and there is nothing to balance.

    Args:
        session: of the fit.
        step: of the fit.
        validation: of the fit.
        listeners: callbacks that are told of times.

    Raises:
        MisconfigurationException: the times of the strategy's steps cannot be told apart.
    """
    shares = session.config.balance and session.world_size > 1
    if session.config.balance and not shares:
        rank_zero_info(ALONE)
    if shares:
        check(session.strategy, LOCAL_STEPS if session.strategy.copies.local_steps is not None else "")
        _warn_of_batch_norm(session)
    if not listeners and not shares:
        return None
    name = type(session.strategy).__name__
    if session.strategy.window is not None or session.strategy.drives_all_devices:
        raise MisconfigurationException(
            f"{type(listeners[0]).__name__}: {name} plays forward and backward of all ranks or of whole windows by "
            'itself, so that their times cannot be told apart; use strategy="ddp" or "fsdp", or leave it out.'
        )
    return Balance(session, step, validation, listeners, shares)


# -- the looks ------------------------------------------------------------------------------------------------


class Balance:
    """Looks at the ranks' times every `PERIOD` windows, tells callbacks of them, and changes shares.

    What ranks tell at one boundary is read at the next, so that nobody waits for it. All ranks read the same numbers
    and decide alike.

    Args:
        session: of the fit.
        step: of the fit.
        validation: of the fit.
        listeners: callbacks that are told of each look.
        shares: whether shares change.
    """

    def __init__(
        self,
        session: Session,
        step: Step,
        validation: EvaluationLoop,
        listeners: Sequence[Callback],
        shares: bool,
    ) -> None:
        self._session, self._step, self._validation = session, step, validation
        self._listeners, self._changes = listeners, shares
        device = session.strategy.root_device
        by_events = has_timed_events(device)
        self._times = DeviceTimes.of(device, perf_counter) if by_events else StepTimes(perf_counter)
        self._rows: RowsToCome | None = None  # told, and not yet read
        self._most = (0, math.inf)  # the look at which memory was looked at last, and what it has room for
        self._windows = -WARM_UP
        self._cut = 0  # counts changes of shares, so that windows that the newest cut are told apart
        self._control = ShareControl(session.strategy.replicas.count)
        self._total, self._often, self._micro = 0, 1, 1
        self._parts: tuple[int, ...] = ()  # of what is shared out at once, by the newest shares
        self._expected: list[int] = []  # and of a full window
        self._largest = 0.0  # micro-batch of this rank so far
        self._index = session.strategy.replicas.index
        self._counts: Sequence[float] = []  # the ranks' samples of a window that was found to be as expected

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, steps are measured."""
        try:
            with self._times.attached(self._session.strategy, self._step, self._validation):
                yield
        finally:
            if self._rows is not None:
                self._rows.leave()

    def begin_epoch(self, feed: Feed, epoch: int, accumulate: int) -> None:
        """An epoch is about to be opened, or what is left of one."""
        feed.prepare(epoch, accumulate)
        self._times.attach_source(*feed.sources)
        self._times.begin()
        if self._rows is not None:  # what they say of micro-batches that were drawn is of the epoch before
            self._hear(self._rows, feed, between_epochs=True)
        total, often = feed.shared_at_once()
        if (total, often) != (self._total, self._often):
            if total <= self._control.size and self._changes:
                rank_zero_info(NO_SAMPLES.format(total=total, size=self._control.size))
            self._total, self._often = total, often
            self._control = ShareControl(self._control.size)
        self._micro = feed.micro
        self._expect(apportion(total, self._control.size, feed.shares))

    def _expect(self, parts: Sequence[int]) -> None:
        expected = [part * self._often for part in parts]
        self._cut += expected != self._expected
        self._parts, self._expected, self._counts = tuple(parts), expected, []

    def window_ended(self, window: Window) -> None:
        """At a boundary."""
        of_rank = window.of_rank
        samples = of_rank[self._index]
        counts = of_rank is self._counts or list(of_rank) == self._expected  # full windows share a list
        self._times.end_window(samples, self._cut if counts else -1)
        self._windows += 1
        if counts and of_rank is not self._counts:
            self._counts, self._largest = of_rank, max(self._largest, samples / self._micro)
        if self._rows is not None:
            self._hear(self._rows, self._session.fit.loaded)
        elif self._windows % PERIOD == 0:
            self._look()

    def _look(self) -> None:
        """After every few windows, those of the start of a fit left out."""
        if self._windows > 0:
            self._tell()
        else:
            self._times.take(-1)

    def _tell(self) -> None:
        """Begin a look: this rank's medians, how far it has drawn, and how many samples it has room for."""
        windows, busy = self._times.take(self._cut)
        parts = typical(windows) if windows and self._listeners else UNTOLD
        mine = median(busy) if len(busy) >= LEAST else math.nan
        told = [mine, float(self._session.fit.loaded.drawn), self._room(), *parts]
        self._rows = RowsToCome(told, alone=self._session.world_size == 1)

    def _hear(self, told: RowsToCome, feed: Feed, between_epochs: bool = False) -> None:
        rows, self._rows = told.read(), None
        for listener in self._listeners:
            listener._on_step_times(self._session.trainer, [WindowTimes(*row[3:]) for row in rows])
        move = self._decide(rows) if self._changes else None
        if move is None:
            return
        progress, number = self._session.fit.progress, None
        if not between_epochs:
            # what was told is of one window before; in that, each rank has drawn as many more, and may have gone past
            # the last window, where it has no part of that
            number = max(int(row[1]) for row in rows) + 2 * self._micro
        held = feed.reshare(move.after, number)
        self._expect(move.after)
        where = "now" if between_epochs else "the next epoch" if held is None else f"batch {held}"
        rank_zero_info(said(move, progress.global_step, where))

    def _decide(self, rows: Sequence[Sequence[float]]) -> Move | None:
        busy = [row[0] for row in rows]
        if any(map(math.isnan, busy)) or self._total <= self._control.size:
            return None
        most = [int(min(row[2], 2**62)) for row in rows]
        return self._control.look(busy, self._parts, most)

    def _room(self) -> float:
        """How many of the samples that are shared out at once this rank's memory has room for; infinite: unknown."""
        looks = self._windows // PERIOD
        if self._changes and self._largest and looks >= self._most[0]:
            free = _samples_in_free_memory(self._session, self._largest)
            self._most = (looks + LOOKS_AT_MEMORY, free)
        return max(self._largest, self._most[1]) * self._micro / self._often


def _samples_in_free_memory(session: Session, largest: float) -> float:
    """How many samples of a micro-batch there is memory for, where that can be told; else infinite.

    Args:
        session: between two windows, so that all that a micro-batch needs is free.
        largest: samples of the largest one so far.
    """
    strategy, activations = session.strategy, session.activations
    device = strategy.root_device
    most = memory_peak(device)
    if most is not None:
        each = (most - (memory_held(device) or 0)) / largest
    elif activations is not None and activations.samples:
        each = 2 * activations.total / activations.samples  # a backward makes gradients of them
    else:
        return math.inf
    free = free_memory(device, strategy.world.local_size)
    return math.inf if free is None or each <= 0 else ROOM * free / each


def said(move: Move, step: int, where: str) -> str:
    """What the user is told of a change of shares."""
    after, before = (", ".join(map(str, parts)) for parts in (move.after, move.before))
    took = ", ".join(f"{seconds * 1e3:.3g}" for seconds in move.seconds)
    return (
        f"balance: step {step}: of {sum(move.after)} samples ranks take {after} from {where} on. They took {before}, "
        f"in {took} ms: steps should be {move.gain:.2f} x as fast."
    )
