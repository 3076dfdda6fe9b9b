"""scale_batch_size: which size is found, and that everything else is afterwards what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.callbacks import BatchSizeFinder, Callback
from lockstep.extensions.extras.tuner.batch_size import BatchSizeSearch, search
from lockstep.ground.errors import MisconfigurationException
from lockstep.tuner import Tuner
from lockstep.utilities.combined_loader import CombinedLoader
from tests.extensions.extras.tuner.pieces import Compare, Data, Net, differences
from tests.loop.pieces import Recorder, Slope, numbers, quiet


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking over all objects of a test session takes a second, at each size that does not fit."""
    monkeypatch.setattr("lockstep.extensions.extras.tuner.batch_size.garbage_collection_cuda", lambda: None)


def played(most: int, samples: int = 10**9, **options: Any) -> tuple[int, list[int]]:
    """What a search finds where ``most`` is the largest size that fits, and the sizes that it tried."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    settings = BatchSizeSearch(**{"mode": "power", **options})
    return search(fits, lambda size: size >= samples, settings), tried


@pytest.mark.parametrize(
    ("most", "options", "found", "tried"),
    [
        (100, {}, 64, [2, 4, 8, 16, 32, 64, 128]),
        (100, {"max_trials": 3}, 8, [2, 4, 8]),
        (100, {"init_val": 512}, 64, [512, 256, 128, 64]),
        (100, {"init_val": 3, "max_val": 50}, 50, [3, 6, 12, 24, 48, 50]),
        (40, {"init_val": 60, "max_val": 50}, 25, [50, 25]),
        (100, {"samples": 10}, 16, [2, 4, 8, 16]),
        (1, {}, 1, [2, 1]),
        (0, {}, 0, [2, 1]),
        (21, {"mode": "binsearch"}, 21, [2, 4, 8, 16, 32, 24, 20, 22, 21]),
        (21, {"mode": "binsearch", "margin": 0.05}, 19, [2, 4, 8, 16, 32, 24, 20, 22, 21]),
        (7, {"mode": "binsearch", "init_val": 12}, 7, [12, 6, 9, 7, 8]),
        (0, {"mode": "binsearch"}, 0, [2, 1]),
        (100, {"mode": "binsearch", "samples": 10}, 16, [2, 4, 8, 16]),
    ],
)
def test_the_search(most: int, options: dict[str, Any], found: int, tried: list[int]) -> None:
    assert played(most, **options) == (found, tried)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize("start", [1, 2, 6, 64])
def test_what_is_found_fits_and_was_tried(mode: str, start: int) -> None:
    for most in range(1, 70):
        found, tried = played(most, mode=mode, init_val=start)
        assert found in tried
        assert found <= most
        assert len(tried) == len(set(tried))
        assert found == most if mode == "binsearch" else 2 * found + 1 > most


@pytest.mark.parametrize(("most", "mode"), [(20, "power"), (20, "binsearch"), (1000, "power")])
def test_the_sizes_are_lightnings(most: int, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.tuner import Tuner as Theirs

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.datamodule.batch_size > most:
                raise RuntimeError("CUDA out of memory")
            return (batch[0] @ self.w).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class TheirData(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
        batch_size = 5
        train_dataloader = lambda self: DataLoader(Data().train_dataloader().dataset, self.batch_size)  # noqa: E731

    quiet_flags = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    theirs = lightning.Trainer(accelerator="cpu", enable_checkpointing=False, max_epochs=50, **quiet_flags)
    expected = Theirs(theirs).scale_batch_size(Model(), datamodule=TheirData(), mode=mode)
    data = Data(most=most)
    assert Tuner(quiet()).scale_batch_size(Net(), datamodule=data, mode=mode) == expected == data.batch_size


def test_a_size_is_tried_for_some_steps() -> None:
    module, data = Net(), Data(most=8)
    assert Tuner(quiet()).scale_batch_size(module, datamodule=data, steps_per_trial=2) == 8
    assert module.sizes == [2, 2, 4, 4, 8, 8]
    assert set(module.steps) == {0, 1}


def test_steps_go_through_the_data_again_where_it_is_short() -> None:
    module, data = Net(), Data(count=4)
    assert Tuner(quiet(max_epochs=1)).scale_batch_size(module, datamodule=data, steps_per_trial=3) == 4
    assert module.sizes == [2, 2, 2, 4, 4, 4]


class Combined(Data):
    def train_dataloader(self) -> Any:
        loaders = [super(Combined, self).train_dataloader() for _ in range(2)]
        return CombinedLoader(loaders, "max_size")


class OfTwo(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def test_a_search_over_combined_loaders_went_on_above_their_data() -> None:
    found = Tuner(quiet(max_epochs=1)).scale_batch_size(OfTwo(), datamodule=Combined(count=6), steps_per_trial=1)
    assert found == 8


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}  # never steps an optimizer


def test_manual_optimization_is_tried_for_some_batches() -> None:
    module = Manual()
    assert Tuner(quiet()).scale_batch_size(module, datamodule=Data(most=4), steps_per_trial=2) == 4
    assert module.sizes == [2, 2, 4, 4]


class Own(Net):
    """Keeps the size, and its loader, in the module."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.data = Data(most=4)

    def train_dataloader(self) -> Any:
        self.data.batch_size = self.hparams.width
        return self.data.train_dataloader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.data.on_before_batch_transfer(batch, dataloader_idx)


def test_the_size_may_be_one_of_the_modules_hyperparameters() -> None:
    module = Own()
    assert Tuner(quiet()).scale_batch_size(module, batch_arg_name="width") == 4
    assert module.hparams.width == 4


# -- other calls -------------------------------------------------------------------------------------------


class Judged(Net):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_evaluations(method: Any) -> None:
    data, trainer = Data(most=8), quiet()
    assert Tuner(trainer).scale_batch_size(Judged(), datamodule=data, method=method) == 8
    assert data.tried == [2, 4, 8, 16]
    assert data.batch_size == 8
    assert trainer.validate_loop.feed is None


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_evaluation_goes_on_with_the_size_that_its_callback_found(method: str) -> None:
    data, finder = Data(most=8), BatchSizeFinder()
    trainer = quiet(callbacks=[finder])
    output = getattr(trainer, method)(Judged(), datamodule=data)
    assert finder.optimal_batch_size == data.tried[-1] == 8
    if method == "predict":
        assert [len(part) for part in output] == [8] * 6
    else:
        assert list(output[0]) == ["val_loss"]


def test_a_validation_inside_a_fit_searches_nothing() -> None:
    data = Data(most=8)
    quiet(callbacks=[BatchSizeFinder()], max_epochs=2, limit_train_batches=1).fit(Net(), datamodule=data)
    assert data.tried == [2, 2, 4, 4, 8, 8, 16, 16, 8, 8]  # training and validation loaders


# -- what it leaves ----------------------------------------------------------------------------------------


class InMidFit(BatchSizeFinder):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            self.scale_batch_size(trainer, pl_module)


@pytest.mark.parametrize("finder", [BatchSizeFinder, InMidFit])
def test_as_a_callback_it_leaves_everything_bitwise(finder: Any) -> None:
    before, after, module, data = Compare(), Compare(), Net(), Data(most=12)
    callbacks = [before, finder(mode="binsearch", margin=0.0, steps_per_trial=2), after]
    quiet(callbacks=callbacks, logger=Recorder(), max_epochs=4).fit(module, datamodule=data)
    for first, second in zip(before.notes, after.notes, strict=True):
        assert differences(first, second) == []
    assert data.batch_size == 12
    assert module.sizes[-4:] == [12, 12, 12, 12]


def test_an_epoch_in_mid_fit_begins_with_the_size_that_was_found() -> None:
    module, data = Net(), Data(most=12)
    finder = InMidFit(mode="binsearch", margin=0.0, steps_per_trial=1)
    quiet(callbacks=[finder], max_epochs=3, limit_val_batches=0).fit(module, datamodule=data)
    assert module.sizes[20:] == [2, 4, 8, 12, 12, 12, 12, 12]


class Planned(Net):
    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_a_schedule_over_the_whole_fit_is_planned_with_the_size_that_was_found() -> None:
    module = Planned()
    quiet(callbacks=[BatchSizeFinder()], max_epochs=2).fit(module, datamodule=Data(most=8))
    assert module.planned == 2 * 6


class Raising(Data):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.batch_size == 8:
            raise RuntimeError("shape mismatch")
        return batch


class Watching(Net):
    """Has a schedule that is never stepped in its one epoch, and watches what a callback logs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "of a callback"}}


class Logs(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("of a callback", 1.0)


def test_a_search_does_without_the_metric_that_a_schedule_watches() -> None:
    """It ended in "monitors 'of a callback', which was not logged": its trials have no callbacks."""
    finder = BatchSizeFinder(max_trials=2)
    trainer = quiet(max_epochs=1, callbacks=[finder, Logs()])
    trainer.fit(Watching(), datamodule=Data(count=8))
    assert finder.optimal_batch_size == 4
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_another_error_is_raised_and_the_size_put_back() -> None:
    data, module = Raising(), Net()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Tuner(quiet()).scale_batch_size(module, datamodule=data)
    assert data.batch_size == 5
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


def test_nothing_that_fits_is_an_error() -> None:
    data = Data(most=0)
    with pytest.raises(RuntimeError, match="not even batch_size=1 fits"):
        Tuner(quiet()).scale_batch_size(Net(), datamodule=data)
    assert data.batch_size == 5


# -- what cannot work --------------------------------------------------------------------------------------


def test_a_loader_given_as_an_object_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"a loader that is passed to trainer\.fit"):
        Tuner(quiet()).scale_batch_size(Net(), numbers(4))
    with pytest.raises(MisconfigurationException, match=r"a loader that is passed to trainer\.validate"):
        Tuner(quiet()).scale_batch_size(Net(), dataloaders=numbers(4), method="validate")


def test_no_attribute_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="found no `size`"):
        Tuner(quiet()).scale_batch_size(Net(), datamodule=Data(), batch_arg_name="size")
    with pytest.raises(MisconfigurationException, match="found no `size`"):
        quiet(callbacks=BatchSizeFinder(batch_arg_name="size")).fit(Net(), datamodule=Data())


class Two(Data):
    def val_dataloader(self) -> Any:
        return [self.loader(), self.loader()]


def test_several_loaders_of_an_evaluation_are_refused() -> None:
    class Takes(Judged):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    with pytest.raises(MisconfigurationException, match="needs one loader, but there are 2"):
        Tuner(quiet()).scale_batch_size(Takes(), datamodule=Two(), method="validate")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "cubic"}, "mode='cubic'"),
        ({"margin": 1.0}, "margin=1.0"),
        ({"init_val": 0}, "init_val=0"),
        ({"steps_per_trial": 0}, "steps_per_trial=0"),
        ({"method": "sanity"}, "method='sanity'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tuner(quiet()).scale_batch_size(Net(), datamodule=Data(), **options)


def test_several_processes_and_a_second_finder_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="works in one process only"):
        Tuner(quiet(devices=2, strategy="ddp_spawn")).scale_batch_size(Net(), datamodule=Data())
    with pytest.raises(ValueError, match="BatchSizeFinder"):
        Tuner(quiet(callbacks=BatchSizeFinder())).scale_batch_size(Net(), datamodule=Data())


def test_a_fast_dev_run_finds_nothing() -> None:
    with pytest.warns(UserWarning, match="fast_dev_run"):
        assert Tuner(quiet(fast_dev_run=True)).scale_batch_size(Net(), datamodule=Data()) is None


def test_a_small_slope_needs_no_validation() -> None:
    class Sized(Slope):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return numbers(4, self.batch_size)

    module = Sized()
    assert Tuner(quiet()).scale_batch_size(module, steps_per_trial=1) == 4
    assert module.batches == [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]


class NoneAboveTwo(Data):
    """Gives None for each batch of more than two samples, as a collate function may."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        collate = loader.collate_fn
        loader.collate_fn = lambda samples: None if len(samples) > 2 else collate(samples)
        return loader


@pytest.mark.timeout(30)
def test_a_search_whose_batches_are_all_none_never_ended() -> None:
    module, data = Net(), NoneAboveTwo(count=8)
    assert Tuner(quiet(max_epochs=1)).scale_batch_size(module, datamodule=data) == 8
    assert set(module.sizes) == {2}
