"""What users change while a Trainer lives: its callbacks, hooks of the module, ``training_step``, flags, schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import profile

from lockstep import LightningDataModule, LightningModule
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.ground.types import LRSchedulerConfig
from lockstep.loop.checks import is_param_in_hook_signature
from lockstep.loop.hooks import is_overridden
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, acting, numbers, quiet


class Counts(Callback):
    """Counts the batches that it sees, and logs."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.log("counted", float(self.batches))  # type: ignore[attr-defined]


class Acts(Slope):
    """Does something in a hook, in the epochs of ``at``."""

    def __init__(self, hook: str, act: Any, at: tuple[int, ...] = (0,)) -> None:
        super().__init__(lr=0.1)
        inherited = getattr(self, hook)

        def acting(*args: Any, **kwargs: Any) -> Any:
            if self.current_epoch in at:
                act(self)
            return inherited(*args, **kwargs)

        setattr(self, hook, acting)


@pytest.mark.everyday
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_callback_that_a_hook_adds_was_in_the_list_and_never_called(hook: str) -> None:
    counts = Counts()
    trainer = quiet(max_epochs=2)
    trainer.fit(Acts(hook, lambda module: module.trainer.callbacks.append(counts)), numbers(3))
    assert counts.batches == 6
    assert trainer.callback_metrics["counted"] == 6
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Slope(), numbers(3))  # it stays the Trainer's
    assert counts.batches == 9


def test_a_checkpoint_callback_that_setup_adds_saves(tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, filename="it")
    quiet(max_epochs=1).fit(Acts("setup", lambda module: module.trainer.callbacks.append(saves)), numbers(2))
    assert [path.name for path in tmp_path.iterdir()] == ["it.ckpt"]


def test_callbacks_that_are_changed_between_fits_were_those_of_the_first() -> None:
    first, added, other = Counts(), Counts(), Counts()
    trainer = quiet(max_epochs=1, callbacks=[first])

    def seen() -> tuple[int, int, int]:
        trainer.fit(Slope(), numbers(3))
        trainer.fit_loop.max_epochs += 1
        return first.batches, added.batches, other.batches

    assert seen() == (3, 0, 0)
    trainer.callbacks.append(added)
    assert seen() == (6, 3, 0)
    trainer.callbacks.remove(first)
    assert seen() == (6, 6, 0)
    trainer.callbacks = [other]
    assert seen() == (6, 6, 3)


def test_a_module_keeps_its_callbacks_beside_those_that_are_added() -> None:
    own, mine, added = Counts(), Counts(), Callback()

    trainer = quiet(max_epochs=1, callbacks=[mine])
    trainer.fit(acting(configure_callbacks=lambda m: [own]), numbers(2))  # in the place of the Trainer's
    trainer.callbacks.append(added)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Slope(), numbers(2))
    assert (own.batches, mine.batches) == (2, 2)
    assert trainer.callbacks == [mine, added]


def test_what_is_no_callback_is_refused_where_it_was_added() -> None:
    trainer = quiet(max_epochs=1)
    trainer.callbacks.append(Counts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"trainer\.callbacks: Counts is a class"):
        trainer.fit(Slope(), numbers(2))


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_epoch_start"])
def test_a_hook_that_the_module_is_given_while_it_is_set_up_is_called(hook: str) -> None:
    called: list[int] = []

    def give(module: Slope) -> None:
        module.on_after_backward = lambda: called.append(module.trainer.global_step)  # type: ignore[method-assign]

    quiet(max_epochs=2).fit(Acts(hook, give), numbers(2))
    assert called == [0, 1, 2, 3]


def test_another_training_step_holds_from_the_epoch_on_that_it_was_given_in() -> None:
    seen: list[float] = []

    def second(module: Slope) -> None:
        def step(batch: Any) -> Any:
            seen.append(batch.item())
            return (2 * module.w * batch).mean()

        module.training_step = step  # type: ignore[method-assign,assignment]

    module = Acts("on_train_epoch_start", second, at=(1,))
    quiet(max_epochs=3).fit(module, numbers(2))
    assert (module.batches, seen) == ([[1], [2]], [1, 2, 1, 2])
    assert module.gradients == [1, 2, 2, 4, 2, 4]


def test_a_bound_that_a_hook_sets_was_that_of_the_fits_beginning() -> None:
    def bound(module: Slope) -> None:
        module.trainer.gradient_clip_val = 0.5

    module = Acts("on_train_epoch_start", bound, at=(1,))
    quiet(max_epochs=2).fit(module, numbers(2))
    assert module.applied == pytest.approx([1, 2, 0.5, 0.5], abs=1e-5)


def test_a_scheduler_that_a_hook_adds_is_stepped() -> None:
    def schedule(module: Slope) -> None:
        made = torch.optim.lr_scheduler.StepLR(module.trainer.optimizers[0], 1, gamma=0.5)
        module.trainer.lr_scheduler_configs.append(LRSchedulerConfig(made))

    trainer = quiet(max_epochs=3)
    trainer.fit(Acts("on_train_epoch_start", schedule, at=(1,)), numbers(2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("method", ["validate", "test", "predict", "fit"])
def test_a_call_within_a_fits_epochs_lost_what_the_fit_had_logged(method: str) -> None:
    def call(module: Slope) -> None:
        getattr(module.trainer, method)(module, numbers(2))

    with pytest.raises(MisconfigurationException, match=rf"trainer\.{method}\(\) in a hook of trainer\.fit"):
        quiet(max_epochs=1).fit(Acts("on_train_epoch_end", call), numbers(2))


# -- ``zero_grad`` in automatic optimization: lockstep's own is torch's at less cost, and another way is called --


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
    with patch.object(torch.optim.Optimizer, "zero_grad", autospec=True) as of_torch:
        fit(Slope())  # type: ignore[arg-type]
    assert of_torch.call_count >= 4
    replaced: list[Any] = []

    def replace(module: Any) -> None:
        optimizer = module.trainer.optimizers[0]
        replaced.append(patch.object(optimizer, "zero_grad", wraps=optimizer.zero_grad).start())

    fit(acting(Steps, on_train_start=replace))
    assert replaced[0].call_count == 4


def test_a_profile_names_it() -> None:
    with profile() as seen:
        fit(Steps())
    assert "Optimizer.zero_grad#SGD.zero_grad" in {event.key for event in seen.key_averages()}
    assert fit(Steps()) is not None


# -- Whether something is overridden, asked as users ask it; the answers are Lightning's -------------------------


class Data(LightningDataModule):
    def setup(self, stage: str) -> None: ...


class Calls(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "instance", "parent", "answer"),
    [
        ("training_step", Slope(), None, True),
        ("validation_step", Slope(), None, False),
        ("on_train_batch_end", Slope(), LightningModule, True),
        ("setup", Data(), None, True),
        ("teardown", Data(), None, False),
        ("on_fit_start", Calls(), None, True),
        ("on_fit_end", Calls(), None, False),
        ("training_step", None, None, False),
    ],
)
def test_is_overridden(name: str, instance: Any, parent: Any, answer: bool) -> None:
    assert is_overridden(name, instance, parent) is answer


def test_questions_without_an_answer() -> None:
    with pytest.raises(ValueError, match="pass its base class as `parent=`"):
        is_overridden("anything", object())
    with pytest.raises(ValueError, match="LightningModule has no such method"):
        is_overridden("anything", Slope())


def one(batch: Any) -> None: ...


def two(batch: Any, batch_idx: int) -> None: ...


def many(*args: Any) -> None: ...


@pytest.mark.parametrize("hook", [one, two, many, Slope().training_step])
@pytest.mark.parametrize("options", [{}, {"explicit": True}, {"min_args": 2}, {"min_args": 1, "explicit": True}])
@pytest.mark.filterwarnings("ignore")
def test_what_a_hook_takes_is_told_as_lightning_tells_it(hook: Any, options: dict[str, Any]) -> None:
    from tests.aliases.surface import lightning

    if lightning() is None:
        pytest.skip("lightning is not installed")
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature as theirs

    assert is_param_in_hook_signature(hook, "batch_idx", **options) == theirs(hook, "batch_idx", **options)
