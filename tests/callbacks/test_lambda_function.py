"""LambdaCallback: functions in the place of hooks."""

from __future__ import annotations

import pytest
from torch import nn

from lockstep.callbacks.lambda_function import HOOKS, LambdaCallback
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.fake_trainer import FakeTrainer


def test_functions_are_called_with_the_arguments_of_their_hooks() -> None:
    seen: list[tuple] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append((trainer, module, stage)),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append((batch_idx,)),
        on_train_end=None,
    )
    trainer, module = FakeTrainer([callback], max_epochs=1, num_training_batches=2), nn.Linear(1, 1)
    trainer.fit(module)
    assert seen == [(trainer, module, "fit"), (0,), (1,)]


def test_every_hook_may_be_given() -> None:
    calls: list[str] = []
    callback = LambdaCallback(**{name: lambda *args, name=name: calls.append(name) for name in HOOKS})
    for name in sorted(HOOKS):
        getattr(callback, name)()
    assert calls == sorted(HOOKS)


def test_a_hook_that_does_not_exist_or_cannot_be_called() -> None:
    with pytest.raises(MisconfigurationException, match="did you mean `on_train_batch_end`"):
        LambdaCallback(on_train_batch_ends=print)
    with pytest.raises(MisconfigurationException, match="on_train_end=3"):
        LambdaCallback(on_train_end=3)  # type: ignore[arg-type]
