"""Errors and warnings of the kinds that Lightning raises, so that what programs catch is caught here, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lockstep import Callback, Trainer
from lockstep.callbacks import EarlyStopping
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing import BoringModel, RandomDataset
from tests.loop.pieces import quiet


class NoState:
    """A scheduler that cannot be saved."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        pass


class Scheduled(BoringModel):
    """Its schedule is what ``make`` makes of the optimizer."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], **entry: Any) -> None:
        super().__init__()
        self.make, self.entry = make, entry

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.entry}]


class ClipsByWord(BoringModel):
    def configure_gradient_clipping(self, optimizer: Any, *settings: Any) -> None:
        self.clip_gradients(optimizer, "much")  # type: ignore[arg-type]


def loader() -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 4))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: quiet().fit(nn.Linear(2, 2)),  # type: ignore[arg-type]
        lambda: quiet().validate(None, loader()),
        lambda: Trainer(gradient_clip_val="much"),  # type: ignore[arg-type]
        lambda: Trainer(accelerator="cpu", devices=[0, 1]),
        lambda: quiet(max_steps=1).fit(ClipsByWord(), loader()),
        lambda: quiet(max_steps=1).fit(Scheduled(NoState), loader()),
        lambda: quiet().fit(BoringModel(), object()),
        lambda: quiet().validate(BoringModel(), object()),
        lambda: quiet().predict(BoringModel(), {"a": 3}),
    ],
    ids=["module", "no module", "flag", "devices", "clipping", "scheduler", "train", "val", "predict"],
)
def test_what_is_of_a_wrong_type_is_a_type_error_too(mistake: Callable[[], Any]) -> None:
    with pytest.raises(TypeError) as caught:
        mistake()
    assert isinstance(caught.value, MisconfigurationException)


def test_a_loader_that_gives_no_batches_is_named() -> None:
    class Returns(BoringModel):
        def train_dataloader(self) -> Any:
            return object()

    with pytest.raises(
        MisconfigurationException, match=r"train_dataloader is <object .*> *, an? object, which gives no"
    ):
        quiet().fit(Returns())


def test_saving_before_there_is_a_module_is_an_attribute_error_too(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="nothing to save before the first fit"):
        quiet().save_checkpoint(tmp_path / "a.ckpt")


def test_going_on_from_weights_alone_is_a_key_error_too(tmp_path: Path) -> None:
    trainer = quiet(max_steps=1)
    trainer.fit(BoringModel(), loader())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(KeyError) as caught:
        quiet(max_steps=2).fit(BoringModel(), loader(), ckpt_path=tmp_path / "weights.ckpt")
    assert str(caught.value).startswith("trainer.fit(ckpt_path=...): the checkpoint holds weights only")


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def test_one_cycle_by_epochs_is_told(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(RuntimeWarning, match=r"OneCycleLR counts steps.*\"interval\": \"step\""):
        quiet(max_steps=1).fit(Scheduled(one_cycle), loader())
    recwarn.clear()
    quiet(max_steps=1).fit(Scheduled(one_cycle, interval="step"), loader())
    assert not [each for each in recwarn if "OneCycleLR" in str(each.message)]


def test_what_a_schedulers_dict_has_besides_is_a_runtime_warning() -> None:
    with pytest.warns(RuntimeWarning, match="unknown keys: 'color'"):
        quiet(max_steps=1).fit(Scheduled(one_cycle, interval="step", color="red"), loader())


class TwoLoaders(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


class StartsWithoutNumber(TwoLoaders):
    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass


class EndsWithoutNumber(TwoLoaders):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass


class TakesAll(TwoLoaders):
    def on_validation_batch_end(self, *args: Any) -> None:
        self.seen = len(args)


@pytest.mark.parametrize(
    ("module", "define"),
    [
        (StartsWithoutNumber, r"on_validation_batch_start\(self, batch, batch_idx, dataloader_idx=0\)"),
        (EndsWithoutNumber, r"on_validation_batch_end\(self, outputs, batch, batch_idx, dataloader_idx=0\)"),
    ],
)
def test_hooks_of_batches_that_cannot_take_the_loaders_number_are_named(module: Any, define: str) -> None:
    with pytest.raises(
        MisconfigurationException, match=rf"several loaders, and.*takes no `dataloader_idx`.*`{define}`"
    ):
        quiet().validate(module(), [loader(), loader()])
    quiet().validate(module(), loader())
    whole = TakesAll()
    quiet().validate(whole, [loader(), loader()])
    assert whole.seen == 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_steps_of_evaluations_that_draw_themselves_are_refused_as_those_of_training(stage: str) -> None:
    class Draws(BoringModel):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            next(dataloader_iter)

        test_step = predict_step = validation_step  # type: ignore[assignment]

    name = {"validate": "validation"}.get(stage, stage)
    with pytest.raises(MisconfigurationException, match=rf"`{name}_step\(dataloader_iter\)` is not supported"):
        getattr(quiet(), stage)(Draws(), loader())


def test_a_fit_that_goes_on_without_a_callback_says_whose_state_is_lost(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def callbacks() -> list[Callback]:
        return [EarlyStopping("a", check_on_train_epoch_end=True, strict=False)]

    trainer = quiet(max_epochs=1, callbacks=callbacks())
    trainer.fit(BoringModel(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    recwarn.clear()
    quiet(max_epochs=2, callbacks=callbacks()).fit(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")
    quiet().validate(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert not [each for each in recwarn if "states of callbacks" in str(each.message)]
    with pytest.warns(UserWarning, match=r"the states of callbacks that this Trainer does not have: EarlyStopping\{"):
        quiet(max_epochs=2).fit(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")


def test_a_name_may_not_end_as_those_of_several_loaders_do() -> None:
    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss/dataloader_idx_0", 1.0)
            return super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"'loss/dataloader_idx_0'.*leave it out"):
        quiet(max_steps=1).fit(Logs(), loader())


class Clips(BoringModel):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def configure_gradient_clipping(self, optimizer: Any, *ignored: Any) -> None:
        self.clip_gradients(optimizer, **self.settings)


def test_clipping_by_two_bounds_or_an_unknown_way_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0\.5\) differs.*gradient_clip_val=0\.1"):
        quiet(max_steps=1, gradient_clip_val=0.1).fit(Clips(gradient_clip_val=0.5), loader())
    quiet(max_steps=1, gradient_clip_val=0.1).fit(Clips(gradient_clip_val=0.1), loader())
    with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm='foo'"):
        quiet(max_steps=1).fit(Clips(gradient_clip_algorithm="foo"), loader())


def test_the_loop_tells_which_batch_runs() -> None:
    seen: list[Any] = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            loop = trainer.fit_loop
            assert loop.batch_idx == loop.epoch_loop.batch_idx == batch_idx

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loop = trainer.fit_loop
            seen.append((loop.batch_idx, loop.total_batch_idx, loop.epoch_progress.current.completed))

    trainer = quiet(max_epochs=2, limit_train_batches=2, callbacks=[Reads()])
    assert trainer.fit_loop.batch_idx == -1
    trainer.fit(BoringModel(), loader())
    assert seen == [(0, 0, 0), (1, 1, 0), (0, 2, 1), (1, 3, 1)]
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    with pytest.raises(AttributeError, match=r"epoch_progress\.current\.completed, which .* sets, is an inner"):
        trainer.fit_loop.epoch_progress.current.completed = 5
    with pytest.raises(AttributeError, match=r"_batches_that_stepped, which .* sets"):
        trainer.fit_loop.epoch_loop._batches_that_stepped = 5


def test_predictions_that_are_none_are_told(recwarn: pytest.WarningsRecorder) -> None:
    class Every(BoringModel):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return None if batch_idx % 2 else batch_idx

    assert quiet().predict(Every(), loader(), return_predictions=False) is None
    assert not [each for each in recwarn if "predict_step" in str(each.message)]
    with pytest.warns(UserWarning, match="`predict_step` returned None: the list of predictions has None"):
        assert quiet().predict(Every(), loader()) == [0, None, 2, None]


def test_an_optimizer_whose_step_is_a_mock_trains_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = create_autospec(torch.optim.SGD.step)
    monkeypatch.setattr(torch.optim.SGD, "step", steps)
    steps.__module__ = None
    trainer = quiet(max_steps=2)
    trainer.fit(BoringModel(), loader())
    assert steps.call_count == trainer.global_step == 2
    assert repr(trainer.wrapped_optimizers[0]).startswith("LightningSGD (")
