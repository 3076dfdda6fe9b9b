"""One window: what a fit plays its windows with, put together from the parts in the files beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.ahead import Ahead
from lockstep.loop.automatic import Automatic
from lockstep.loop.backward import Backward
from lockstep.loop.closures import ByClosure
from lockstep.loop.manual import Manual
from lockstep.loop.micro_batches import MicroBatches
from lockstep.loop.optimizers import LightningOptimizer
from lockstep.loop.session import Session
from lockstep.loop.step_output import StepOutputs
from lockstep.loop.update import Update


class Step:
    """Plays the windows of a fit.

    Three ways lead through a window; :meth:`setup` takes one for the whole fit: automatic optimization, manual
    optimization, and that of an engine that plays ahead: all forwards and backwards of a window at once.

    Attributes:
        batches: how its micro-batches begin and end.
        update: of its optimizers.
        shared: whether there are several ranks.
        way: the one that was taken.
        window: plays a window, yielding after each micro-batch, when its hooks have run.
    """

    update: Update
    batches: MicroBatches
    window: Callable[..., Iterator[None]]
    way: Automatic | Ahead | Manual

    def __init__(self, session: Session) -> None:
        self.session = session

    def setup(self) -> None:
        """Make the parts for the windows of this fit; called once, when strategy, module and optimizers are ready."""
        session = self.session
        self.release()
        self.shared = session.world_size > 1
        outputs = StepOutputs(session)
        update = self.update = Update(session, outputs)
        batches = self.batches = MicroBatches(session, update)
        backward = self._backward = Backward(session, update, batches)
        by_engine = session.strategy.window
        if not session.module.automatic_optimization:
            self.way = Manual(session, batches, update)
        elif by_engine is not None:
            self.way = Ahead(session, batches, outputs, update, by_engine)
        else:
            kind = ByClosure if update.by_closure else Automatic
            self.way = kind(session, batches, outputs, update, backward)
        self.window = self.way.window
        self._check_scaler()

    def _check_scaler(self) -> None:
        scaler, update = self.session.strategy.precision.scaler, self.update
        if scaler is not None and update.optimizer is None:
            scaler.refuse(*update.optimizers)
        if scaler is not None and update.needs_closure:
            raise MisconfigurationException(
                f"{scaler.asked_by} with {type(update.optimizer).__name__}: an update that may be left out and a line "
                'search do not go together; use precision="bf16-mixed" or "32-true", and non_finite="protect".'
            )

    @property
    def wrapped(self) -> list[LightningOptimizer]:
        """The optimizers as users get them."""
        return self.update.wrapped if "update" in vars(self) else []

    def go_on_after(self, batch: int, accumulate: int) -> None:
        """A resumed run begins after this micro-batch."""
        if isinstance(self.way, Ahead):
            self.way.go_on_after(batch, accumulate)

    def release(self) -> None:
        """The fit is over: take the hooks from its optimizers."""
        if "update" in vars(self):
            self.update.watch.detach()

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimization, with the hooks around it."""
        self._backward.by_hand(loss, *args, **kwargs)
