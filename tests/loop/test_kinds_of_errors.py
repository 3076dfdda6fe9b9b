"""Errors and warnings of the kinds that Lightning raises, so that what programs catch is caught here, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lockstep import LightningModule, Trainer
from lockstep.callbacks import Callback, EarlyStopping
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import forget_warnings
from lockstep.loop.call import _whereabouts
from lockstep.loop.step import has_uneven_targets
from lockstep.testing import BoringModel, RandomDataset
from tests.loop.pieces import Slope, Validated, acting, heard, numbers, quiet


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


def loader() -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 4))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: quiet().fit(nn.Linear(2, 2)),  # type: ignore[arg-type]
        lambda: quiet().validate(None, loader()),
        lambda: Trainer(gradient_clip_val="much"),  # type: ignore[arg-type]
        lambda: Trainer(accelerator="cpu", devices=[0, 1]),
        lambda: quiet(max_steps=1).fit(clips(gradient_clip_val="much"), loader()),
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
    with pytest.raises(
        MisconfigurationException, match=r"train_dataloader is <object .*> *, an? object, which gives no"
    ):
        quiet().fit(acting(BoringModel, train_dataloader=lambda m: object()))


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
    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None: ...  # type: ignore[override]


class EndsWithoutNumber(TwoLoaders):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...  # type: ignore[override]


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
    def draws(self: Any, dataloader_iter: Any) -> None: ...

    name = {"validate": "validation"}.get(stage, stage)
    with pytest.raises(MisconfigurationException, match=rf"`{name}_step\(dataloader_iter\)` is not supported"):
        getattr(quiet(), stage)(type("Draws", (BoringModel,), {f"{name}_step": draws})(), loader())


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
    module = acting(BoringModel, training_step=lambda m, *_: m.log("loss/dataloader_idx_0", 1.0))
    with pytest.raises(MisconfigurationException, match=r"'loss/dataloader_idx_0'.*leave it out"):
        quiet(max_steps=1).fit(module, loader())


def clips(**settings: Any) -> Any:
    clip = lambda m, optimizer, *_: m.clip_gradients(optimizer, **settings) or True  # noqa: E731
    return acting(BoringModel, configure_gradient_clipping=clip)


def test_clipping_by_two_bounds_or_an_unknown_way_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0\.5\) differs.*gradient_clip_val=0\.1"):
        quiet(max_steps=1, gradient_clip_val=0.1).fit(clips(gradient_clip_val=0.5), loader())
    quiet(max_steps=1, gradient_clip_val=0.1).fit(clips(gradient_clip_val=0.1), loader())
    with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm='foo'"):
        quiet(max_steps=1).fit(clips(gradient_clip_algorithm="foo"), loader())


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


# -- What would otherwise happen without a word: a sentence each, that names the step or what to write -----------


def heard_again(run: Any, *words: str) -> list[str]:
    forget_warnings()
    return heard(run, *words)


# -- how long a fit is


def stops() -> Any:
    return acting(on_train_epoch_end=lambda m: setattr(m.trainer, "should_stop", True))


def test_a_fit_whose_epochs_nobody_chose_says_where_it_ends() -> None:
    [said] = heard_again(lambda: quiet().fit(stops(), numbers(3)), "max_epochs", "not set")
    assert "1000 epochs, at step 3000" in said
    assert "max_epochs=-1" in said
    for flags in ({"max_epochs": 1000}, {"max_steps": 2}, {"max_time": {"minutes": 1}}, {"fast_dev_run": True}):
        assert heard_again(lambda flags=flags: quiet(**flags).fit(stops(), numbers(3)), "not set") == []  # type: ignore[misc]
    assert heard_again(lambda: quiet().predict(acting(forward=lambda m, x: x), numbers(1)), "max_epochs") == []


def test_a_resume_beyond_the_limit_says_that_nothing_is_left(tmp_path: Any) -> None:
    trainer = quiet(max_epochs=3)
    trainer.fit(Slope(), numbers(2))
    path = str(tmp_path / "three.ckpt")
    trainer.save_checkpoint(path)

    def resume(**flags: Any) -> list[str]:
        return heard_again(lambda: quiet(**flags).fit(Slope(), numbers(2), ckpt_path=path), "nothing left to train")

    [said] = resume(max_epochs=3)
    assert "after step 6 and 3 epochs" in said
    assert "max_epochs=3 reached" in said
    assert path in said
    assert "max_steps=4 reached" in resume(max_epochs=9, max_steps=4)[0]
    assert resume(max_epochs=4) == []


# -- values that a step returns, as in 2019


class Of2019(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "log": {"train_loss": loss}, "progress_bar": {"train_loss": loss}}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"val_loss": batch.mean(), "text": "x"}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"test_loss": 1.0}


class LogsLate(Of2019):
    """Keeps what its step returns by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.values.append(batch.mean())
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.values).mean())


class Reads(Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        pass


def test_returned_values_that_nobody_reads_are_named() -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    [said] = heard_again(lambda: trainer.fit(Of2019(), numbers(3), numbers(2)), "training_step")
    assert "['log', 'progress_bar']" in said
    assert "self.log_dict(values)" in said
    [said] = heard_again(lambda: quiet().validate(Of2019(), numbers(3)), "validation_step")
    assert "['val_loss']" in said
    assert "self.log('val_loss', value)" in said
    assert len(heard_again(lambda: quiet().test(Of2019(), numbers(3)), "self.log('test_loss', value)")) == 1
    assert heard_again(lambda: quiet().validate(LogsLate(), numbers(3)), "validation_step") == []
    assert heard_again(lambda: quiet(callbacks=[Reads()]).validate(Of2019(), numbers(3)), "validation_step") == []


# -- parts that do not learn as they seem to


def test_a_part_in_eval_mode_stayed_in_it_without_a_word() -> None:
    class Loaded(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout()).eval()  # as transformers gives it

    said = heard_again(lambda: quiet(max_epochs=1).fit(Loaded(), numbers(1)), "eval mode")
    assert len(said) == 1
    assert "'body' and 2 more" in said[0]
    assert not heard_again(lambda: quiet(max_epochs=1).fit(Slope(), numbers(1)), "eval mode")


# -- Losses that are means over labels, of which samples have different numbers: a fit says so once --------------


PADDED = [[1, 2, 3], [4, -100, -100]]
MASKED = [[1, -100, 3], [-100, 2, 3]]
WHOLE = [[1, 2, 3], [4, 5, 6]]


class Labels(LightningModule):
    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.words, self.weighs = nn.Embedding(8, 8), weighs

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"]
        loss = nn.functional.cross_entropy(self.words(labels.clamp(min=0)).flatten(0, 1), labels.flatten())
        return {"loss": loss, "weight": (labels != -100).sum()} if self.weighs else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("rows", "weighs", "accumulate", "warns"),
    [
        (PADDED, False, 2, True),
        (PADDED, True, 2, False),
        (PADDED, False, 1, False),  # one process, one batch a step: there is no other way to cut it
        (MASKED, False, 2, False),
        (WHOLE, False, 2, False),
    ],
)
def test_a_mean_over_labels_that_is_not_weighed_by_them_is_named(
    rows: list[list[int]], weighs: bool, accumulate: int, warns: bool
) -> None:
    loader: Any = DataLoader([{"labels": torch.tensor(row)} for row in rows * 4], 2)  # type: ignore[arg-type]
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    assert len(heard(lambda: trainer.fit(Labels(weighs), loader), "labels that are not -100")) == warns


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([[-100, 2, 3]])}, True),  # the next batch may have another number
        ({"labels": torch.tensor([1, -100])}, False),  # one a sample
        ({"labels": torch.tensor([[0.5, -100.0]])}, False),
        ({"labels": torch.zeros(0, 3, dtype=torch.long)}, False),
        ({"targets": torch.tensor(PADDED)}, False),
        (torch.tensor(PADDED), False),
        (None, False),
    ],
)
def test_which_batches_have_uneven_targets(batch: object, expected: bool) -> None:
    assert has_uneven_targets(batch) is expected


# -- Where a rank is, as those who look for hangs are told -------------------------------------------------------


def test_no_batch_is_told_in_set_up_and_in_validation() -> None:
    told: dict[str, int] = {}
    note = lambda m, *_: (told.setdefault(*_whereabouts(m.trainer.session)), None)[1]  # noqa: E731
    module = acting(Validated, setup=note, training_step=note, validation_step=note)
    quiet(max_epochs=1, num_sanity_val_steps=0).fit(module, numbers(2), numbers(1))
    assert told == {"setup": -1, "training_step": 0, "validation_step": -1}
