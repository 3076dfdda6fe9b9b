"""Hooks of old: refused or told of before anything starts, so that no result is silently missing."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Callback
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.names.former_methods import former_methods
from lockstep.precision.base import Precision
from tests.loop.pieces import Slope, acting, numbers, quiet


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
    told = r"training_step_end \(the end of training_step\), on_epoch_end \(on_train_epoch_end\)"
    nothing = {name: lambda self, *args: None for name in ("training_step_end", "on_epoch_end")}
    with pytest.warns(UserWarning, match=told):
        quiet(max_epochs=1).fit(type("Old", (Slope,), nothing)(), numbers(1))


def test_the_old_name_of_configure_model_is_called_before_it() -> None:
    calls: list[str] = []
    names = ("configure_sharded_model", "setup", "configure_optimizers")
    module = acting(**{name: lambda *args, name=name: calls.append(name) for name in names})
    with pytest.warns(DeprecationWarning, match="rename it to configure_model"):
        quiet(max_epochs=1).fit(module, numbers(1))
    assert calls == ["setup", "configure_sharded_model", "configure_optimizers"]


def test_both_names_of_configure_model_are_refused() -> None:
    module = acting(configure_sharded_model=lambda m: None, configure_model=lambda m: None)
    with pytest.raises(MisconfigurationException, match="configure_model and configure_sharded_model"):
        quiet(max_epochs=1).fit(module, numbers(1))


def ended_by(method: str, base: type) -> Any:
    return type("Own", (base,), {method: lambda self, *args, **kwargs: None})()


@pytest.mark.parametrize("method", former_methods("strategy"))
@pytest.mark.parametrize("base", [SingleDeviceStrategy, DDPStrategy])
def test_a_method_of_lightnings_strategies_is_refused_by_name(method: str, base: Any) -> None:
    """A subclass's `optimizer_step`, which clipped or logged say, was never called, and nobody said so."""
    assert not hasattr(base, method)
    module = Evaluated()
    with pytest.raises(MisconfigurationException, match=rf"^Own\.{method}: a Strategy .* Instead: "):
        quiet(max_epochs=1, strategy=ended_by(method, base), devices=1).fit(module, numbers(1))
    assert not module.started


@pytest.mark.parametrize("method", former_methods("precision"))
def test_a_method_of_lightnings_precisions_is_refused_by_name(method: str) -> None:
    assert not hasattr(Precision, method)
    with pytest.raises(MisconfigurationException, match=rf"^Own\.{method}: a Precision .* Instead: "):
        quiet(max_epochs=1, plugins=[ended_by(method, Precision)]).fit(Evaluated(), numbers(1))


def test_overrides_that_are_called_are_not_refused() -> None:
    calls = []

    class Own(SingleDeviceStrategy):
        def step(self, optimizer: Any, closure: Any = None, **options: Any) -> Any:
            calls.append("step")
            return super().step(optimizer, closure, **options)

        def run(self, fn: Any, *args: Any) -> Any:
            calls.append("run")
            return super().run(fn, *args)

        def helper(self) -> None: ...

    quiet(max_epochs=1, strategy=Own()).fit(Slope(), numbers(1))
    assert calls == ["run", "step"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_training_epoch_end", "on_train_epoch_end"),
        ("on_validation_epoch_ends", "on_validation_epoch_end"),
        ("on_trian_batch_end", "on_train_batch_end"),
    ],
)
@pytest.mark.parametrize("of", ["module", "callback"])
def test_a_misspelt_hook_is_told(of: str, name: str, meant: str) -> None:
    own = ended_by(name, Slope if of == "module" else Callback)
    module, callbacks = (own, []) if of == "module" else (Slope(), [own])
    with pytest.warns(
        UserWarning, match=rf"Own\.{name} is not a hook, so the Trainer does not call it: did you mean {meant}\?"
    ):
        quiet(max_epochs=1, callbacks=callbacks).fit(module, numbers(1))


@pytest.mark.parametrize("name", ["on_epoch_end", "on_keyboard_interrupt", "on_pretrain_routine_start"])
def test_a_callbacks_hook_of_old_is_told(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"Own has former hooks that are never called; .*: {name} \(on_"):
        quiet(max_epochs=1, callbacks=[ended_by(name, Callback)]).fit(Slope(), numbers(1))


@pytest.mark.filterwarnings("error:.*is not a hook")
def test_methods_of_the_users_own_are_not_told() -> None:
    quiet(max_epochs=1).fit(acting(on_reward=lambda m: None, on_click=lambda m: None), numbers(1))
