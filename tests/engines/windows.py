"""A strategy that plays whole windows: all forwards, then all backwards, the last one first, as a pipeline might."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lockstep.engines.engine import MicroBatch
from tests.engines.averaging import AveragingStrategy


class ForwardsFirst(AveragingStrategy):
    """Averages gradients, behind the backwards of the window."""

    def window(self, step: Callable[..., Any], micro_batches: Sequence[MicroBatch]) -> list[Any]:
        outputs: list[Any] = []
        losses: list[Tensor | None] = []
        for each in micro_batches:
            each.enter()
            outputs.append(None if each.empty else self.run(step, *each.args))
            losses.append(None if each.empty else each.loss(outputs[-1]))
        with self.synchronize(False):
            for loss in reversed(losses):
                if loss is not None:
                    self.backward(loss)
        self._average()
        return outputs
