"""LambdaCallback: functions in the place of hooks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lockstep.callbacks.lambda_function import HOOKS, LambdaCallback
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.side_by_side import OURS, loader, model, theirs, trainer


def test_a_hook_that_does_not_exist() -> None:
    with pytest.raises(MisconfigurationException, match=r"a callback has no such hook\. The hooks are ") as raised:
        LambdaCallback(on_train_batch_ends=print)
    assert isinstance(raised.value, TypeError)


def test_every_hook_of_lightnings_is_called_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        if kit is not OURS:
            names = set(inspect.signature(kit.callbacks.LambdaCallback.__init__).parameters) - {"self"}
            assert names <= HOOKS
        calls: dict[str, int] = {}

        def count(name: str, calls: dict[str, int] = calls) -> Any:
            return lambda *args, **named: calls.update({name: calls.get(name, 0) + 1})

        callback = kit.callbacks.LambdaCallback(**{name: count(name) for name in sorted(HOOKS)})
        module = model(kit)
        module.test_step = module.validation_step
        module.predict_step = lambda batch, batch_idx: None
        run = trainer(kit, callbacks=[callback], max_epochs=2, num_sanity_val_steps=1)
        run.fit(module, loader(12, 4), loader(8, 4))
        run.test(module, loader(8, 4), verbose=False)
        run.predict(module, loader(8, 4))
        found.append(calls)
    assert found[0] == found[1]
    assert len(found[0]) == len(HOOKS) - 3  # no exception, no checkpoint
