"""Exchange of step times between ranks, so that ``Trainer(balance=True)`` can adjust the ranks' shares of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from torch import nn

from lockstep.callbacks.base import Callback
from lockstep.data.feed import Feed
from lockstep.data.partition import apportion
from lockstep.data.window import Window
from lockstep.engines.strategy import Strategy
from lockstep.extensions.balancing.balance.step_times import DeviceTimes, StepTimes, WindowTimes, typical
from lockstep.extensions.balancing.shares import Move, ShareControl
from lockstep.ground.comm import RowExchange
from lockstep.ground.device import has_timed_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import free_memory, memory_held, memory_peak
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.session import Session
from lockstep.loop.step import Step

PERIOD = 8
"""Windows between two exchanges of the ranks' times."""
LEAST = 4
"""Minimum number of windows with equal shares from which a rank's speed is judged."""
WARM_UP = 2
"""Windows at the start of a fit that are not measured, because memory is being allocated."""
NO_TIMES = WindowTimes(*[math.nan] * len(WindowTimes._fields))
"""Sent where no callback listens, or where the device has not finished a window yet."""
LOOKS_AT_MEMORY = 32
"""Exchanges between two queries of the free memory. A query takes half a millisecond."""
ROOM = 0.8
"""Fraction of the free memory that a larger share may fill."""

LOCAL_STEPS = ", since it takes local steps and averages the weights of the nodes evenly"
ALONE = (
    "Trainer(balance=True) has no effect on one device: it divides a global batch between several. Use more devices, "
    "or remove `balance`."
)
NO_SAMPLES = (
    "Trainer(balance=True): a global batch has {total} samples for {size} ranks, so shares cannot change. Use a larger "
    "batch_size."
)
BATCH_NORM = (
    "Trainer(balance=True): {name} computes its statistics over one rank's samples, and ranks have different numbers "
    "of samples. Use Trainer(sync_batchnorm=True) for statistics over the samples of all ranks."
)


# -- conditions -----------------------------------------------------------------------------------------------


def check(strategy: Strategy, why: str = "") -> None:
    """Raise an error if ``balance=True`` is used with a strategy whose ranks cannot have unequal shares.

    One device alone is accepted.

    Args:
        strategy: strategy of the fit.
        why: a reason to refuse the strategy in any case, as a clause for the message.

    Raises:
        MisconfigurationException: the strategy is refused.
    """
    several = strategy.world.size > 1 or strategy.drives_all_devices
    # shares need ranks with samples of their own, and losses that the loop weights before the backward
    takes = strategy.replicas.count == strategy.world.size and not strategy.drives_all_devices
    takes = takes and not strategy.steps_itself and strategy.window is None
    if why or (several and not takes):
        raise MisconfigurationException(
            f"Trainer(balance=True): {type(strategy).__name__} cannot give its ranks unequal shares of a global batch"
            f'{why}. Use strategy="ddp" or "fsdp", or remove `balance`.'
        )


def measure(session: Session, step: Step, validation: EvaluationLoop, listeners: Sequence[Callback]) -> Balance | None:
    """Return a `Balance` for a fit, or None if the shares are fixed and no callback receives step times.

    Args:
        session: the fit's session.
        step: the fit's `Step`, which runs accumulation windows.
        validation: the fit's validation loop.
        listeners: callbacks that receive the times.

    Raises:
        MisconfigurationException: the parts of the strategy's steps cannot be timed separately.
    """
    strategy = session.strategy
    shares = session.config.balance and session.world_size > 1
    if session.config.balance and not shares:
        rank_zero_info(ALONE)
    if shares:
        check(strategy, LOCAL_STEPS if strategy.copies.local_steps is not None else "")
        for name, layer in () if strategy.sync_batchnorm else session.module.named_modules():
            is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
            # layers of torch and of others that synchronize derive from it, too
            if is_norm and "SyncBatchNorm" not in type(layer).__name__ and layer.training:
                rank_zero_warn(BATCH_NORM.format(name=f"{type(layer).__name__} {name!r}"))
                break
    if not listeners and not shares:
        return None
    if strategy.window is not None or strategy.drives_all_devices:
        raise MisconfigurationException(
            f"{type(listeners[0]).__name__}: {type(strategy).__name__} runs the forward and backward of whole windows "
            'or of all devices itself, so their times cannot be measured separately. Use strategy="ddp" or "fsdp", or '
            "remove the callback."
        )
    return Balance(session, step, validation, listeners, shares)


# -- exchanges ------------------------------------------------------------------------------------------------


class Balance:
    """Controller that exchanges the ranks' step times, passes them to callbacks, and adjusts shares of samples.

    All ranks read the same numbers and make the same decision.

    Args:
        session: the fit's session.
        step: the fit's `Step`, which runs accumulation windows.
        validation: the fit's validation loop.
        listeners: callbacks that receive the times.
        shares: True if the ranks' shares of samples change.
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
        # an exchange that is under way: it is read one window later, so that no rank waits for it
        self._rows: RowExchange | None = None
        self._most = (0, math.inf)  # exchange at which memory is queried next, and the samples that fit
        self._windows = -WARM_UP
        # counts changes of shares: only windows with the newest shares are compared
        self._cut = 0
        self._control = ShareControl(session.strategy.replicas.count)
        self._total, self._often, self._micro = 0, 1, 1
        self._parts: tuple[int, ...] = ()  # samples by rank that are divided at once, by the newest shares
        self._expected: list[int] = []  # and those of a full window
        self._largest = 0.0  # micro-batch of this rank so far
        self._index = session.strategy.replicas.index
        # full windows share one list, so that the next one is recognized by identity
        self._counts: Sequence[float] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time the fit's steps within the context."""
        try:
            with self._times.attached(self._session.strategy, self._step, self._validation):
                yield
        finally:
            # other ranks may still wait for this rank's row
            if self._rows is not None:
                self._rows.send_only()

    def begin_epoch(self, feed: Feed, epoch: int, accumulate: int) -> None:
        """Prepare the timers and the shares for a new or resumed epoch, before its DataLoaders are opened."""
        feed.prepare(epoch, accumulate)
        self._times.attach_source(*feed.sources)
        self._times.begin()
        # their numbers of drawn micro-batches belong to the previous epoch
        if self._rows is not None:
            self._read(self._rows, feed, between_epochs=True)
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
        """Record a finished accumulation window, and start or finish an exchange of step times if it is due."""
        of_rank = window.of_rank
        samples = of_rank[self._index]
        counts = of_rank is self._counts or list(of_rank) == self._expected
        # an incomplete window at an epoch's end does not count for these shares
        self._times.end_window(samples, self._cut if counts else -1)
        self._windows += 1
        if counts and of_rank is not self._counts:
            self._counts, self._largest = of_rank, max(self._largest, samples / self._micro)
        if self._rows is not None:
            self._read(self._rows, self._session.fit.loaded)
        elif self._windows % PERIOD == 0:
            if self._windows > 0:
                self._send()
            else:
                self._times.take(-1)

    def _send(self) -> None:
        """Start to exchange each rank's median times, loading progress, and largest share that fits its memory."""
        windows, busy = self._times.take(self._cut)
        parts = typical(windows) if windows and self._listeners else NO_TIMES
        mine = median(busy) if len(busy) >= LEAST else math.nan
        entry = [mine, float(self._session.fit.loaded.drawn), self._room(), *parts]
        self._rows = RowExchange(entry, alone=self._session.world_size == 1)

    def _read(self, sent: RowExchange, feed: Feed, between_epochs: bool = False) -> None:
        """Finish the exchange ``sent``, pass the times to callbacks, and change the shares if a change is due."""
        rows, self._rows = sent.read(), None
        for listener in self._listeners:
            listener._on_step_times(self._session.trainer, [WindowTimes(*row[3:]) for row in rows])
        move = self._decide(rows) if self._changes else None
        if move is None:
            return
        progress, number = self._session.fit.progress, None
        if not between_epochs:
            # the exchange was started one window ago: each rank has drawn as many more since, and one without a part in
            # that window may have drawn past it
            number = max(int(row[1]) for row in rows) + 2 * self._micro
        changes_at = feed.reshare(move.after, number)
        self._expect(move.after)
        if between_epochs:
            where = "now"
        else:
            where = "the next epoch" if changes_at is None else f"batch {changes_at}"
        rank_zero_info(message_of(move, progress.global_step, where))

    def _decide(self, rows: Sequence[Sequence[float]]) -> Move | None:
        busy = [row[0] for row in rows]
        if any(map(math.isnan, busy)) or self._total <= self._control.size:
            return None
        most = [int(min(row[2], 2**62)) for row in rows]
        return self._control.look(busy, self._parts, most)

    def _room(self) -> float:
        """Return the largest share (number of samples) that fits this rank's memory; infinite if unknown."""
        looks = self._windows // PERIOD
        if self._changes and self._largest and looks >= self._most[0]:
            free = _samples_in_free_memory(self._session, self._largest)
            self._most = (looks + LOOKS_AT_MEMORY, free)
        return max(self._largest, self._most[1]) * self._micro / self._often


def _samples_in_free_memory(session: Session, largest: float) -> float:
    """Return the size, in samples, of the largest micro-batch that fits the free memory; infinite if unknown.

    Args:
        session: the fit's session, between two windows, so that all memory of a micro-batch is free.
        largest: number of samples in the largest micro-batch so far.
    """
    strategy, activations = session.strategy, session.activations
    device = strategy.root_device
    most = memory_peak(device)
    if most is not None:
        each = (most - (memory_held(device) or 0)) / largest
    elif activations is not None and activations.samples:
        each = 2 * activations.total / activations.samples  # the backward allocates their gradients
    else:
        return math.inf
    free = free_memory(device, strategy.world.local_size)
    return math.inf if free is None or each <= 0 else ROOM * free / each


def message_of(move: Move, step: int, where: str) -> str:
    """Return the log message for a change of shares."""
    after, before = (", ".join(map(str, parts)) for parts in (move.after, move.before))
    took = ", ".join(f"{seconds * 1e3:.3g}" for seconds in move.seconds)
    return (
        f"balance: step {step}: from {where} on, ranks take {after} of {sum(move.after)} samples. They took {before}, "
        f"in {took} ms; steps should be {move.gain:.2f} x as fast."
    )
