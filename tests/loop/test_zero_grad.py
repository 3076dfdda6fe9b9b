"""``zero_grad`` in automatic optimization: lockstep's own is torch's at less cost, and another way is called."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import profile

from tests.loop.pieces import Slope, numbers, quiet


class Notes(torch.optim.SGD):
    """With a way of its own."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


class Steps(Slope):
    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), 0.01)

    def on_before_backward(self, loss: Any) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())


def fit(module: Steps) -> Any:
    trainer = quiet(max_epochs=1)
    trainer.fit(module, numbers(4))
    return trainer.optimizers[0]


def test_an_optimizers_own_zero_grad_is_called() -> None:
    assert fit(Steps(Notes)).calls == 4


def test_a_zero_grad_that_the_user_has_replaced_is_called() -> None:
    with patch.object(torch.optim.Optimizer, "zero_grad", autospec=True) as replaced:
        fit(Slope())  # type: ignore[arg-type]
    assert replaced.call_count >= 4

    class Replaces(Steps):
        def on_train_start(self) -> None:
            optimizer = self.trainer.optimizers[0]
            self.replaced = patch.object(optimizer, "zero_grad", wraps=optimizer.zero_grad).start()

    module = Replaces()
    fit(module)
    assert module.replaced.call_count == 4


def test_a_profile_names_it() -> None:
    with profile() as seen:
        fit(Steps())
    assert "Optimizer.zero_grad#SGD.zero_grad" in {event.key for event in seen.key_averages()}
    assert fit(Steps()) is not None
