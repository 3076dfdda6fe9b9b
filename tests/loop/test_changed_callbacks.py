"""What users change while a Trainer lives: its callbacks, hooks of the module, ``training_step``, flags, schedulers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningDataModule, LightningModule, Trainer
from lockstep import callbacks as all_callbacks
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.types import LRSchedulerConfig
from lockstep.loggers import CSVLogger
from lockstep.loop.checks import is_param_in_hook_signature
from lockstep.loop.hooks import is_overridden
from tests.loop.pieces import Slope, acting, numbers, quiet
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool


class Counts(Callback):
    """Counts the batches that it sees, and logs."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.log("counted", float(self.batches))  # type: ignore[attr-defined]


def acts(hook: str, act: Any, at: int = 0) -> Any:
    """A module that does something in a hook, in one epoch."""
    return acting(**{hook: lambda module, *_: (module.current_epoch == at and act(module)) and None})


@pytest.mark.everyday
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_callback_that_a_hook_adds_was_in_the_list_and_never_called(hook: str) -> None:
    counts = Counts()
    trainer = quiet(max_epochs=2)
    trainer.fit(acts(hook, lambda module: module.trainer.callbacks.append(counts)), numbers(3))
    assert counts.batches == 6
    assert trainer.callback_metrics["counted"] == 6
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Slope(), numbers(3))  # it stays the Trainer's
    assert counts.batches == 9


def test_a_checkpoint_callback_that_setup_adds_saves(tmp_path: Path) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path, filename="it")
    quiet(max_epochs=1).fit(acts("setup", lambda module: module.trainer.callbacks.append(saves)), numbers(2))
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

    quiet(max_epochs=2).fit(acts(hook, give), numbers(2))
    assert called == [0, 1, 2, 3]


def test_another_training_step_holds_from_the_epoch_on_that_it_was_given_in() -> None:
    seen: list[float] = []

    def second(module: Slope) -> None:
        def step(batch: Any) -> Any:
            seen.append(batch.item())
            return (2 * module.w * batch).mean()

        module.training_step = step  # type: ignore[method-assign,assignment]

    module = acts("on_train_epoch_start", second, at=1)
    quiet(max_epochs=3).fit(module, numbers(2))
    assert (module.batches, seen) == ([[1], [2]], [1, 2, 1, 2])
    assert module.gradients == [1, 2, 2, 4, 2, 4]


def test_a_bound_that_a_hook_sets_was_that_of_the_fits_beginning() -> None:
    def bound(module: Slope) -> None:
        module.trainer.gradient_clip_val = 0.5

    module = acts("on_train_epoch_start", bound, at=1)
    quiet(max_epochs=2).fit(module, numbers(2))
    assert module.applied == pytest.approx([1, 2, 0.5, 0.5], abs=1e-5)


def test_a_scheduler_that_a_hook_adds_is_stepped() -> None:
    def schedule(module: Slope) -> None:
        made = torch.optim.lr_scheduler.StepLR(module.trainer.optimizers[0], 1, gamma=0.5)
        module.trainer.lr_scheduler_configs.append(LRSchedulerConfig(made))

    trainer = quiet(max_epochs=3)
    module = acts("on_train_epoch_start", schedule, at=1)
    module.lr = 0.1
    trainer.fit(module, numbers(2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.parametrize("method", ["validate", "test", "predict", "fit"])
def test_a_call_within_a_fits_epochs_lost_what_the_fit_had_logged(method: str) -> None:
    def call(module: Slope) -> None:
        getattr(module.trainer, method)(module, numbers(2))

    with pytest.raises(MisconfigurationException, match=rf"trainer\.{method}\(\) in a hook of trainer\.fit"):
        quiet(max_epochs=1).fit(acts("on_train_epoch_end", call), numbers(2))


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


# -- Copies of a Trainer and of what hangs on it, by pickle, torch.save and deepcopy: before, within and after a f


def saved(part: Any) -> Any:
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_value(part: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(part))


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda part: pickle.loads(pickle.dumps(part)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


class Net(LightningModule):
    """Has itself looked at within a step."""

    look: Callable[[Net], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.look is not None and (self.current_epoch, batch_idx) == (1, 1):
            look, self.look = self.look, None
            look(self)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Keeps(Net):
    kept: Any

    def on_train_end(self) -> None:
        self.kept = self.optimizers()


def made(folder: Path, **flags: Any) -> Trainer:
    named = ("DeviceStatsMonitor", "LearningRateMonitor", "Timer", "TQDMProgressBar")
    callbacks: list[Callback] = [getattr(all_callbacks, name)() for name in named]
    callbacks += [ModelCheckpoint(folder, monitor="val_loss"), all_callbacks.OnExceptionCheckpoint(folder)]
    callbacks.append(all_callbacks.EarlyStopping("val_loss", patience=9))
    callbacks.append(all_callbacks.GradientAccumulationScheduler({0: 1}))
    if is_there("extras"):
        callbacks.append(all_callbacks.StochasticWeightAveraging(1e-2))
    settings = {"accelerator": "cpu", "max_epochs": 2, "logger": CSVLogger(folder), "callbacks": callbacks}
    return Trainer(**{**settings, "profiler": "simple", "enable_model_summary": False, **flags})


def parts_of(trainer: Trainer) -> Iterator[Any]:
    yield from (trainer, trainer.strategy, trainer.profiler, trainer.precision_plugin, trainer.callback_metrics)
    yield from (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    yield from (*trainer.callbacks, *trainer.loggers, *trainer.optimizers, *trainer.lr_scheduler_configs)
    module = trainer.session.module if trainer.session.has("module") else None
    if module is not None:
        yield module
        yield module.optimizers()
        yield module.lr_schedulers()


def check_all(trainer: Trainer, ways: dict[str, Callable[[Any], Any]] = WAYS) -> int:
    parts = list(parts_of(trainer))
    for part in parts:
        for way, copied in ways.items():
            assert isinstance(copied(part), type(part)), f"{way} of {type(part).__name__}"
    return len(parts)


def looked_at(folder: str, strategy: str) -> list[int]:
    seen = []
    # a rank of the pool has the classes of this file by value
    ways = WAYS if strategy == "auto" else {"cloudpickle": by_value, "deepcopy": copy.deepcopy}
    trainer, module = made(Path(folder), strategy=strategy, devices=1 if strategy == "auto" else 2), Net()
    seen.append(check_all(trainer, ways))
    module.look = lambda module: seen.append(check_all(module.trainer, ways))
    trainer.fit(module)
    seen.append(check_all(trainer, ways))
    return seen


def test_a_trainer_could_not_be_copied(tmp_path: Path) -> None:
    """Before a fit by a lambda, within one by a generator, behind it by an optimizer that says it is another class."""
    before, within, after = looked_at(str(tmp_path), "auto")
    assert before < within == after


def test_nor_one_of_several_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for before, within, after in ranks(2).run(looked_at, str(tmp_path), "ddp"):
        assert before < within == after


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_goes_on_where_the_trainer_was(way: str, tmp_path: Path) -> None:
    copies: list[Trainer] = []
    trainer, module = made(tmp_path), Net()
    module.look = lambda module: copies.append(WAYS[way](module.trainer))
    trainer.fit(module)
    (within,), after = copies, WAYS[way](trainer)
    assert (within.current_epoch, within.global_step) == (1, 5)
    assert (after.current_epoch, after.global_step) == (trainer.current_epoch, trainer.global_step) == (2, 8)
    assert after.callback_metrics == trainer.callback_metrics
    assert after.checkpoint_callback.best_model_path == trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    after.fit_loop.max_epochs = 3
    assert after.fit(Net()).global_step == 12
    assert within.fit(Net()).stopped == "max_epochs=2 reached"
    assert trainer.global_step == 8
    with pytest.raises(MisconfigurationException, match="a copy of a Trainer starts without one"):
        WAYS[way](trainer).save_checkpoint(tmp_path / "copy.ckpt")


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_optimizer_steps_alone(way: str) -> None:
    trainer, module = Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False), Keeps()
    trainer.fit(module)
    copied = WAYS[way](module.kept)
    assert isinstance(copied, torch.optim.SGD)
    (weight, _) = copied.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    copied.step()
    assert torch.equal(weight, before - copied.param_groups[0]["lr"])
    assert not torch.equal(weight, module.layer.weight)
    with pytest.raises(MisconfigurationException, match="this optimizer is a copy that belongs to no fit"):
        with copied.toggle_model():
            pass
    assert type(WAYS[way](module).kept) is type(module.kept)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp"])
def test_a_copy_starts_its_ranks(strategy: str) -> None:
    """It ran in one process, as if that were a rank of its own."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    for way in WAYS.values():
        copied = way(trainer)
        assert copied._spawns == trainer._spawns
        assert type(copied._launch.__self__) is type(trainer._launch.__self__)  # type: ignore[attr-defined]


def refused(folder: str) -> list[str]:
    said = []

    def look(module: Net) -> None:
        for way in WAYS.values():
            try:
                way(module.trainer)
            except NotImplementedError as error:
                said.append(str(error))

    module = Net()
    module.look = look
    made(Path(folder), strategy="fsdp", devices=2, callbacks=None, profiler=None).fit(module)
    return said


def test_a_model_in_parts_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(refused, str(tmp_path)):
        assert len(said) == len(WAYS)
        assert all("FSDPStrategy, its Trainer and its loops cannot be copied or pickled" in text for text in said)
