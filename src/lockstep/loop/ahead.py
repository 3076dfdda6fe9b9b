"""A window that the engine plays ahead: all its batches are there before the first forward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from lockstep.data.weighing import share_of
from lockstep.data.window import Window
from lockstep.engines.engine import MicroBatch, WindowPlayer
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.micro_batches import Begun, MicroBatches
from lockstep.loop.parts import StepParts
from lockstep.loop.session import Session
from lockstep.loop.step_output import StepOutputs, detached
from lockstep.loop.update import Update


class Ahead:
    """Has the engine play windows.

    Hooks of the batches run before and after the window; ``on_after_backward`` runs once.

    Args:
        session, batches, outputs, update: of the fit.
        play: the engine's way through a window.

    Attributes:
        at_once: micro-batches that were played before anybody looked whether a validation is due.

    Raises:
        MisconfigurationException: with the hook or the optimizer that cannot go with it, and the way out.
    """

    def __init__(
        self, session: Session, batches: MicroBatches, outputs: StepOutputs, update: Update, play: WindowPlayer
    ) -> None:
        self._strategy = session.strategy
        self._hooks = session.hooks
        self._results = session.results
        self._scaler = session.strategy.precision.scaler
        self._shared = session.world_size > 1
        self._batches, self._outputs, self._update, self._play = batches, outputs, update, play
        self.at_once = 1
        self._parts = StepParts(session.results)
        self._watch_loss = session.fit.finite.noting
        self._check()

    def _check(self) -> None:
        name = type(self._strategy).__name__
        if self._update.by_closure:
            raise MisconfigurationException(
                f"{name} plays whole windows itself, so that no closure can run them again: use an optimizer whose "
                "`step` needs none, and do not override `optimizer_step`."
            )
        if self._hooks.on_before_backward is not None:
            raise MisconfigurationException(
                f"{name} plays whole windows itself and calls no `on_before_backward`: change the loss in "
                "`training_step`, or gradients in `on_after_backward`, which runs once a window."
            )

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Play one window, yielding after each micro-batch, when its hooks have run."""
        results, batches, update = self._results, self._batches, self._update
        self.at_once = window.size
        begun = [(micro_batch, results.micro_batch) for micro_batch in batches.begun(window, batch_idx)]
        if batches.ended_by_user:
            return
        losses: dict[int, Tensor] = {}  # by number, as backward begins from them
        parts = [self._part(micro_batch, number, losses) for micro_batch, number in begun]
        if not window.begun:
            update.zero_grad(batch_idx)
        if self._shared:
            batches.publish()
        batches.absent = ()
        self._parts = StepParts(results)
        outputs = self._play(batches.training_step, parts)
        self._parts.keep()
        results.show_ahead = self._parts.show_newest  # for a checkpoint of a hook below
        if self._hooks.on_after_backward is not None:
            self._hooks.call("on_after_backward")
        update.prepare()
        self._strategy.step(update.optimizer)  # type: ignore[arg-type]  # there is one on this way
        update.end_window(begun[-1][0].number, True)
        for output, (micro_batch, number) in zip(outputs, begun, strict=True):
            # as elsewhere: who saves at the end of a window does so behind all of its batches
            self._strategy.sync_gradients = micro_batch.last
            self._enter(micro_batch.weight, number)
            self._parts.show()
            batches.absent = micro_batch.absent
            shown = {} if output is None or isinstance(output, Tensor) else detached(output)
            if number in losses:
                shown["loss"] = losses[number]
            # a checkpoint of the hooks goes on after the whole window
            batches.end(shown, micro_batch, done=len(begun) if micro_batch.number == batch_idx else 0)
            yield

    def _part(self, micro_batch: Begun, number: int, losses: dict[int, Tensor]) -> MicroBatch:
        """What the engine gets of a micro-batch."""
        enter = partial(self._enter_part, micro_batch.weight, number)
        loss = partial(self._scaled_loss, micro_batch.share, losses, number)
        return MicroBatch(self._batches.arguments(micro_batch), enter, loss, empty=micro_batch.weight == 0.0)

    def _enter_part(self, weight: float, number: int, part: float = 1.0) -> None:
        self._parts.keep()
        self._enter(weight * part, number)

    def _enter(self, weight: float, number: int) -> None:
        """What is logged from here on is of this micro-batch."""
        self._results.weight, self._results.micro_batch = weight, number
        self._batches.enter_step(muted=weight == 0.0)

    def _scaled_loss(
        self, share: float, losses: dict[int, Tensor], number: int, output: object, part: float = 1.0
    ) -> Tensor | None:
        """What backward begins from, of what ``training_step`` returned for (a part of) micro-batch ``number``."""
        loss, factor = self._outputs.read(output, share_of(share, part))
        if loss is None:
            return None
        if self._watch_loss is not None:
            self._watch_loss(loss)
        loss = loss * factor
        # a copy: on a CPU the mean of a loss lies in the memory of all that it is the mean of
        losses[number] = loss.detach().clone() if number not in losses else losses[number] + loss.detach()
        return loss if self._scaler is None else self._scaler.scale(loss)

    def go_on_after(self, batch: int, accumulate: int) -> None:
        """A resumed run begins after this micro-batch."""
        self.at_once = (batch - 1) % accumulate + 1
