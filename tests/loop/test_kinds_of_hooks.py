"""Hooks that are no plain methods: decorated, wrapped, on the instance, mocks, partials, callable objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lockstep import LightningDataModule, LightningModule
from lockstep.callbacks import Callback, EarlyStopping, LambdaCallback
from lockstep.core.hooks import ModelHooks
from lockstep.loop.hooks import NAMES
from lockstep.trainer.states import TrainerFn
from lockstep.utilities import rank_zero_only
from lockstep.utilities.model_helpers import is_overridden
from tests.loop.pieces import Slope, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

CALLS: list[str] = []


def recorder(name: str) -> Callable[..., None]:
    """A hook of any arguments that notes its call."""

    def hook(*args: Any, **kwargs: Any) -> None:
        CALLS.append(name)

    hook.__name__ = name
    return hook


class CallableObject:
    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.hook(*args, **kwargs)


def with_wraps(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        hook(*args, **kwargs)

    return wrapper


KINDS: dict[str, Callable[[Callable[..., None]], Any]] = {
    "function": lambda hook: hook,
    "no_grad": torch.no_grad(),
    "rank_zero_only": rank_zero_only,
    "wraps": with_wraps,
    "partial": partial,
    "object": CallableObject,
    "mock": lambda hook: Mock(side_effect=hook),
    "mock that wraps": lambda hook: Mock(wraps=hook),
}
SKIPPED = ("on_exception", "on_save_checkpoint", "on_load_checkpoint")
HOOKS = [name for name in NAMES if name not in SKIPPED]


class Both(Slope):
    """Trains, validates, tests and predicts."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def played(kind: str, on_instance: bool, start: Callable[..., Any] = quiet) -> list[str]:
    CALLS.clear()
    make = KINDS[kind]
    module_hooks = {name: make(recorder(name)) for name in HOOKS if hasattr(ModelHooks, name)}
    callback_hooks = {name: make(recorder(f"callback {name}")) for name in HOOKS}
    if on_instance:
        module, callback = Both(), Callback()
        vars(module).update(module_hooks)
        vars(callback).update(callback_hooks)
    else:
        module, callback = type("Made", (Both,), module_hooks)(), type("MadeCallback", (Callback,), callback_hooks)()
    trainer = start(max_epochs=1, callbacks=[callback])
    trainer.fit(module, numbers(3), numbers(2))
    if start is on_ranks:
        return list(CALLS)
    trainer.validate(module, numbers(2), verbose=False)
    trainer.test(module, numbers(2), verbose=False)
    trainer.predict(module, numbers(2))
    return list(CALLS)


@pytest.mark.everyday
@pytest.mark.parametrize("on_instance", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_hook_is_called_as_a_method_is(kind: str, on_instance: bool) -> None:
    expected = played("function", False)
    assert set(expected) >= {f"callback {name}" for name in HOOKS}
    assert played(kind, on_instance) == expected


def played_on_ranks() -> list[tuple[str, bool]]:
    """Three samples go over two ranks: in the last batch one has none, and the hooks that it does not run are named."""
    plain = played("function", False, on_ranks)
    kinds = [kind for kind in KINDS if kind != "rank_zero_only"]  # which is for one rank
    return [(kind, own) for kind in kinds for own in (False, True) if played(kind, own, on_ranks) != plain]


def test_where_a_rank_has_no_samples(ranks: RankPool) -> None:
    """The warning that named them looked for `__self__`, in the last batch of the epoch."""
    assert ranks(2).run(played_on_ranks) == [[], []]


# -- around the base's own


def traced(module: Any, log: list[str], names: list[str]) -> Any:
    """A helper that wraps methods of an instance to see their calls."""

    def wrapped(name: str) -> Callable[..., Any]:
        method = getattr(module, name)

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return method(*args, **kwargs)

        return wrapper

    for name in names:
        setattr(module, name, wrapped(name))
    return module


PUBLIC = [
    name
    for name in dir(LightningModule)
    if (name in vars(ModelHooks) or name in vars(LightningModule))
    and not name.startswith("_")
    and callable(getattr(LightningModule, name))
    and not isinstance(vars(LightningModule).get(name), (classmethod, staticmethod))
]


def test_wrapped_methods_of_the_base_are_no_overrides() -> None:
    """They were: a module was refused over its `configure_sharded_model`, which nobody had written."""
    log: list[str] = []
    module = traced(Both(), log, PUBLIC)
    plain = Both()
    for each in (plain, module):
        each.lr = 0.5
        quiet(max_epochs=2).fit(each, numbers(3), numbers(2))
    assert torch.equal(plain.w, module.w)
    for name in ("on_train_start", "training_step", "backward", "optimizer_step", "configure_gradient_clipping"):
        assert name in log, name
    assert not is_overridden("on_train_start", module, ModelHooks)
    assert is_overridden("on_before_optimizer_step", module, ModelHooks)  # Slope's own


def test_a_wrapped_hook_of_a_deciding_callback_still_comes_last() -> None:
    """EarlyStopping reads what the module logs in its own `on_train_epoch_end`."""

    module = acting(on_train_epoch_end=lambda m: m.log("score", 1.0))
    stop = traced(EarlyStopping("score", patience=1, check_on_train_epoch_end=True), [], ["on_train_epoch_end"])
    assert quiet(max_epochs=9, callbacks=[stop]).fit(module, numbers(1)).epochs == 2


# -- setup


def test_setup_is_given_its_stage_by_name_and_as_lightnings_word() -> None:
    seen: list[Any] = []

    def by_name(self: Any, *arguments: Any, stage: Any) -> None:
        seen.append(stage)

    named = {"setup": by_name, "teardown": by_name}
    module, callback = type("ByName", (Slope,), named)(), type("Callbacks", (Callback,), named)()
    given = {"setup": by_name, "train_dataloader": lambda self: numbers(1)}
    data = type("Data", (LightningDataModule,), given)()
    other = LambdaCallback(setup=lambda trainer, module, when: seen.append(when))  # by another name
    quiet(max_epochs=1, callbacks=[callback, other]).fit(module, datamodule=data)
    assert seen == ["fit"] * 6
    assert all(stage is TrainerFn.FITTING and stage.value == "fit" for stage in seen)


def test_a_wrapper_on_the_instance_may_show_the_functions_own_signature() -> None:
    """`self` was counted among what the loop gives, so that the batch's number was missing."""

    class Plain(Slope):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    module = Plain()
    for name in ("training_step", "validation_step", "on_validation_batch_start"):
        wrapper = functools.partial(lambda bound, *given: bound(*given), getattr(module, name))
        setattr(module, name, functools.wraps(getattr(Plain, name))(lambda *given, call=wrapper: call(*given)))
    quiet(max_epochs=1).fit(module, numbers(2), [numbers(1), numbers(1)])
    assert len(module.batches) == 2
