"""Hooks of old: refused or told of before anything starts, so that no result is silently missing."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import _warned
from tests.loop.pieces import Slope, numbers, quiet


class Evaluated(Slope):
    started = False

    def setup(self, stage: str) -> None:
        self.started = True

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("hook", "call", "instead"),
    [
        ("training_epoch_end", "fit", "on_train_epoch_end"),
        ("validation_epoch_end", "fit", "on_validation_epoch_end"),
        ("validation_epoch_end", "validate", "on_validation_epoch_end"),
        ("test_epoch_end", "test", "on_test_epoch_end"),
    ],
)
def test_an_epoch_end_with_outputs_is_refused_by_its_new_name(hook: str, call: str, instead: str) -> None:
    kind: Any = type("Old", (Evaluated,), {hook: lambda self, outputs: None})
    module = kind()
    with pytest.raises(NotImplementedError, match=rf"Old\.{hook}: .*`{instead}\(self\)`"):
        getattr(quiet(max_epochs=1), call)(module, numbers(1))
    assert not module.started


def test_only_what_the_call_would_need_is_refused() -> None:
    kind: Any = type("Old", (Evaluated,), {"test_epoch_end": lambda self, outputs: None})
    quiet(max_epochs=1).fit(kind(), numbers(1))


def test_other_hooks_of_old_are_told_of_once() -> None:
    class Old(Slope):
        def training_step_end(self, outputs: Any) -> Any: ...

        def on_epoch_end(self) -> None: ...

    _warned.clear()
    told = r"training_step_end \(the end of training_step\), on_epoch_end \(on_train_epoch_end\)"
    with pytest.warns(UserWarning, match=told):
        quiet(max_epochs=1).fit(Old(), numbers(1))


def test_the_old_name_of_configure_model_is_called_before_it() -> None:
    class Old(Slope):
        calls: list[str] = []

        def configure_sharded_model(self) -> None:
            self.calls.append("sharded")

        def setup(self, stage: str) -> None:
            self.calls.append("setup")

        def configure_optimizers(self) -> Any:
            self.calls.append("optimizers")
            return super().configure_optimizers()

    module = Old()
    with pytest.warns(DeprecationWarning, match="rename it to configure_model"):
        quiet(max_epochs=1).fit(module, numbers(1))
    assert module.calls == ["setup", "sharded", "optimizers"]


def test_both_names_of_configure_model_are_refused() -> None:
    class Both(Slope):
        def configure_sharded_model(self) -> None: ...

        def configure_model(self) -> None: ...

    with pytest.raises(MisconfigurationException, match="configure_model and configure_sharded_model"):
        quiet(max_epochs=1).fit(Both(), numbers(1))
