"""lr_find: the numbers of the test, the suggestion, and that everything is afterwards what it was."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import Callback, EarlyStopping, LearningRateFinder, ModelCheckpoint
from lockstep.extensions.extras.tuner.lr_finder import LRFinder
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers import CSVLogger
from lockstep.tuner import Tuner
from lockstep.utilities.combined_loader import CombinedLoader
from tests.extensions.extras.tuner.pieces import Compare, Data, Net, differences, samples
from tests.loop.pieces import QUIET, Recorder, Slope, numbers, quiet

FREE: dict[str, Any] = {"early_stop_threshold": None}


def find(module: Any, data: Any, flags: dict[str, Any] | None = None, **options: Any) -> LRFinder:
    given = {"datamodule": data} if isinstance(data, Data) else {"train_dataloaders": data}
    found = Tuner(quiet(**(flags or {}))).lr_find(module, **given, **options)
    assert found is not None
    return found


# -- its numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_the_rates_and_losses_are_lightnings(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.tuner import Tuner as Theirs

    def model(base: Any) -> Any:
        class Model(base):  # type: ignore[misc]
            def __init__(self, lr: float = 0.01) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return nn.functional.mse_loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

        return Model()

    results = []
    flags = {**QUIET, "max_epochs": 100}
    for base, trainer, tuner in (
        (lightning.LightningModule, lambda: lightning.Trainer(**flags), Theirs),
        (LightningModule, lambda: Trainer(**flags, order="torch"), Tuner),
    ):
        seed_everything(3)
        module = model(base)
        found: Any = tuner(trainer()).lr_find(
            module, DataLoader(samples(), 8, shuffle=True), max_lr=2.0, mode=mode, num_training=60
        )
        results.append((found.results["lr"], found.results["loss"], found.suggestion(), found.suggestion(2, 3)))
        assert module.hparams.lr == found.suggestion()
    (theirs, ours) = results
    assert len(ours[0]) > 20
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert ours[2:] == pytest.approx(theirs[2:], rel=1e-5)


def test_the_losses_are_a_moving_average_by_hand() -> None:
    finder = find(Slope(lr=1.0), numbers(4), min_lr=0.1, max_lr=0.4, num_training=4, mode="linear", attr_name="lr")
    w, average, expected = 0.0, 0.0, []
    rates = [0.1, 0.1 + 2 / 4 * (0.4 - 0.1), 0.1 + 3 / 4 * (0.4 - 0.1), 0.4]
    for step, (rate, x) in enumerate(zip(rates, (1, 2, 3, 4), strict=True)):
        average = 0.98 * average + (1 - 0.98) * w * x
        expected.append(average / (1 - 0.98 ** (step + 2)))
        w -= rate * x
    assert finder.results["lr"] == pytest.approx(rates)
    assert finder.results["loss"] == pytest.approx(expected)


def test_it_takes_all_its_steps_through_a_short_loader() -> None:
    assert len(find(Slope(), numbers(4), {"max_epochs": 1}, num_training=11, **FREE).results["lr"]) == 11


def test_accumulated_batches_are_one_step() -> None:
    module = Slope()
    finder = find(module, numbers(8), {"accumulate_grad_batches": 2}, num_training=4, update_attr=False)
    assert (len(finder.results["lr"]), len(module.batches)) == (4, 8)


class Diverging(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * 0 + (1.0 if self.trainer.global_step < 5 else 1000.0)


def test_a_diverging_loss_ends_the_test_and_none_does_not() -> None:
    assert len(find(Diverging(), numbers(40), num_training=30, update_attr=False).results["loss"]) == 6
    whole = find(Diverging(), numbers(40), num_training=30, update_attr=False, early_stop_threshold=None)
    assert len(whole.results["loss"]) == 30


class Skipping(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


def test_a_step_without_a_loss_is_no_number_and_is_left_out() -> None:
    with pytest.warns(UserWarning, match="returned None"):
        finder = find(Skipping(), numbers(6), num_training=6, update_attr=False)
    assert [math.isnan(loss) for loss in finder.results["loss"]] == [False, False, True, False, False, False]
    assert finder.suggestion(0, 1) in finder.results["lr"]


def test_a_batch_that_was_none_was_a_step_of_the_search() -> None:
    def none_for_two(samples: list[Any]) -> Any:
        return None if 2 in samples else torch.tensor(samples, dtype=torch.float64)

    data = DataLoader([0, 1, 2, 3], batch_size=1, collate_fn=none_for_two)
    finder = find(Slope(), data, num_training=6, update_attr=False, **FREE)
    assert len(set(finder.results["lr"])) == len(finder.results["lr"]) == 6
    assert not any(map(math.isnan, finder.results["loss"]))


def test_too_few_results_suggest_nothing() -> None:
    module = Slope(lr=0.25)
    with pytest.warns(UserWarning, match="too few results to suggest"):
        finder = find(module, numbers(8), num_training=5)
    assert (finder.suggestion(5), module.lr) == (None, 0.25)


# -- what it leaves ----------------------------------------------------------------------------------------


class InMidFit(LearningRateFinder):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            self.lr_find(trainer, pl_module)


@pytest.mark.parametrize("finder", [LearningRateFinder, InMidFit])
def test_as_a_callback_it_leaves_everything_bitwise(finder: Any, tmp_path: Path) -> None:
    seed_everything(1)
    before, after = Compare(), Compare()
    stops = EarlyStopping("val_loss", patience=50)
    callbacks = [
        before,
        finder(num_training_steps=20, update_attr=False, **FREE),
        after,
        stops,
        ModelCheckpoint(tmp_path),
    ]
    flags = {"logger": Recorder(), "enable_checkpointing": None, "callbacks": callbacks, "max_epochs": 4}
    module = Net()
    quiet(**flags, log_every_n_steps=1).fit(module, datamodule=Data())
    assert len(before.notes) == 5
    for first, second in zip(before.notes, after.notes, strict=True):
        assert differences(first, second) == []
    assert module.steps.count(0) == (2 if finder is LearningRateFinder else 1)
    assert len(module.steps) == 20 + 4 * 10


def fitted(tune: bool, folder: Path | None = None) -> tuple[dict[str, Any], Any, Any]:
    seed_everything(1)
    module, data, recorder = Net(), Data(), Recorder()
    trainer = quiet(logger=recorder, max_epochs=2, log_every_n_steps=1)
    if tune:
        Tuner(trainer).lr_find(module, datamodule=data, update_attr=False, num_training=20)
        assert recorder.sent == []
    result = trainer.fit(module, datamodule=data)
    return module.state_dict(), result, recorder.sent


def test_a_fit_after_it_is_the_fit_without_it() -> None:
    (weights, result, sent), (others, other_result, other_sent) = fitted(True), fitted(False)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert result == other_result
    assert sent == other_sent


def test_a_fit_after_a_search_over_combined_loaders_drew_another_order() -> None:
    class OfTwo(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch["a"].tolist()
            return super().training_step(batch["a"], batch_idx)

    def order(searches: bool) -> list[float]:
        shuffled = DataLoader(numbers(8).dataset, shuffle=True, generator=torch.Generator().manual_seed(3))
        data, trainer, module = CombinedLoader({"a": shuffled}), quiet(max_epochs=1, order="torch"), OfTwo()
        if searches:
            Tuner(trainer).lr_find(module, data, num_training=5, update_attr=False)
            module.seen.clear()
        trainer.fit(module, data)
        return module.seen

    assert order(searches=True) == order(searches=False)


class Saved(Net):
    """Keeps a state that only its hooks know of."""

    count = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = torch.tensor(self.count)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = int(checkpoint["count"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


def test_what_the_users_checkpoint_hooks_save_is_put_back() -> None:
    module = Saved()
    find(module, Data(), num_training=5, update_attr=False)
    assert (module.count, len(module.steps)) == (0, 5)


class Raising(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("a fault of the user's")
        return super().training_step(batch, batch_idx)


def test_a_failing_search_leaves_everything_too() -> None:
    module, trainer = Raising(), quiet(callbacks=[Compare()])
    weights, random = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    before = (trainer.callbacks, trainer.config, trainer.fit_loop)
    with pytest.raises(ValueError, match="a fault of the user's"):
        Tuner(trainer).lr_find(module, datamodule=Data(), num_training=20)
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert (trainer.callbacks, trainer.config, trainer.fit_loop) == before
    assert (module.lr, module.seen.item()) == (0.05, 0)


def test_nothing_is_written(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", default_root_dir=tmp_path, logger=CSVLogger(tmp_path), enable_progress_bar=False
    )
    Tuner(trainer).lr_find(Net(), datamodule=Data(), num_training=12)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Dropper(Data):
    ended = 0

    def teardown(self, stage: str) -> None:
        self.ended += 1
        assert stage == "fit"


def test_the_data_module_is_set_up_and_torn_down_once() -> None:
    data = Dropper()
    find(Net(), data, num_training=12)
    assert data.ended == 1


# -- where the rate goes -----------------------------------------------------------------------------------


class ByHparams(Net):
    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        del self.lr
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


def test_the_suggestion_goes_to_the_attribute() -> None:
    module = Net()
    finder = find(module, Data(), num_training=30)
    assert module.lr == finder.suggestion() != 0.05
    module = ByHparams()
    assert module.hparams.learning_rate == 0.05
    finder = find(module, Data(), num_training=30)
    assert module.hparams.learning_rate == finder.suggestion() != 0.05


def test_a_named_attribute_of_the_data_module_is_set() -> None:
    data = Data()
    data.rate = 1.0  # type: ignore[attr-defined]
    finder = find(Net(), data, num_training=30, attr_name="rate")
    assert data.rate == finder.suggestion()  # type: ignore[attr-defined]


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_fit_goes_on_with_the_rate_and_its_schedule() -> None:
    """The scheduler remembers the rate that it was made with: the optimizer is configured anew."""
    module, rates, finder = Net(), Rates(), LearningRateFinder(num_training_steps=30)
    quiet(callbacks=[finder, rates], max_epochs=3).fit(module, datamodule=Data())
    assert finder.optimal_lr is not None
    best = finder.optimal_lr.suggestion()
    assert best is not None
    assert rates.seen == pytest.approx([best, best * 0.9, best * 0.81])
    assert module.lr == best


def test_in_mid_fit_the_optimizer_goes_on_with_the_rate() -> None:
    module, rates, finder = Net(), Rates(), InMidFit(num_training_steps=30)
    quiet(callbacks=[finder, rates], max_epochs=4).fit(module, datamodule=Data())
    assert finder.optimal_lr is not None
    best = finder.optimal_lr.suggestion()
    assert best is not None
    assert rates.seen == pytest.approx([0.05, 0.045, best, best * 0.9])


# -- the picture -------------------------------------------------------------------------------------------


def test_the_plot_shows_results_and_suggestion(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    finder = find(Net(), Data(), num_training=40)
    figure = finder.plot(suggest=True)
    (axes,) = figure.axes
    curve, mark = axes.lines
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "Learning rate", "Loss")
    assert curve.get_xydata().tolist() == [
        list(pair) for pair in zip(finder.results["lr"], finder.results["loss"], strict=True)
    ]
    assert (mark.get_xdata()[0], mark.get_color(), mark.get_marker()) == (finder.suggestion(), "red", "o")
    figure.savefig(tmp_path / "lr.png")
    given, own = pyplot.subplots()
    assert finder.plot(ax=own) is given
    assert len(own.lines) == 1
    pyplot.close("all")


# -- what cannot work --------------------------------------------------------------------------------------


class Manual(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoRate(Slope):
    def __init__(self) -> None:
        super().__init__()
        del self.lr

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "options", "error", "said"),
    [
        (Manual, {}, MisconfigurationException, "manual|automatic_optimization=False"),
        (NoRate, {}, AttributeError, "neither NoRate nor the data module has `lr` or `learning_rate`"),
        (Slope, {"attr_name": "speed"}, AttributeError, "attr_name='speed'"),
        (Slope, {"method": "test"}, MisconfigurationException, "method='test'"),
        (Slope, {"mode": "cubic"}, ValueError, "mode='cubic'"),
        (Slope, {"min_lr": 2.0}, ValueError, "min_lr=2.0, max_lr=1"),
        (Slope, {"num_training": 0}, ValueError, "num_training=0"),
        (Slope, {"dataloaders": [1]}, MisconfigurationException, "train_dataloaders="),
    ],
)
def test_what_cannot_work_is_refused(module: Any, options: dict[str, Any], error: Any, said: str) -> None:
    made = module()
    with pytest.raises(error, match=said):
        Tuner(quiet()).lr_find(made, numbers(4), **options)
    assert made.batches == []


def test_a_fast_dev_run_finds_nothing() -> None:
    with pytest.warns(UserWarning, match="fast_dev_run"):
        assert Tuner(quiet(fast_dev_run=True)).lr_find(Slope(), numbers(4)) is None


def test_a_trainer_that_searches_by_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="LearningRateFinder"):
        Tuner(quiet(callbacks=LearningRateFinder())).lr_find(Slope(), numbers(4))
    with pytest.raises(ValueError, match="mode='cubic'"):
        LearningRateFinder(mode="cubic")


# -- Ctrl-C ------------------------------------------------------------------------------------------------


class Interrupted(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.sizes) == 3:
            signal.raise_signal(signal.SIGINT)
        return super().training_step(batch, batch_idx)


def test_ctrl_c_ends_a_search_and_nothing_is_taken_over() -> None:
    module, trainer = Interrupted(), quiet()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        Tuner(trainer).lr_find(module, datamodule=Data(), num_training=20)
    assert (module.lr, len(module.sizes), trainer.should_stop) == (0.05, 4, False)
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())


def test_ctrl_c_in_the_search_of_a_fit_ends_the_fit() -> None:
    module = Interrupted()
    result = quiet(callbacks=LearningRateFinder(num_training_steps=20)).fit(module, datamodule=Data())
    assert (result.interrupted, result.global_step, module.lr) == (True, 0, 0.05)


def test_a_resumed_fit_goes_on_with_the_rate_of_its_run(tmp_path: Path) -> None:
    """It tested again, with the weights of the checkpoint, and the module had another rate than its optimizer."""
    found = []
    for path in (None, tmp_path / "last.ckpt"):
        seed_everything(1)
        module, finder = Net(), LearningRateFinder(num_training_steps=20, **FREE)
        kept = ModelCheckpoint(tmp_path, save_last=True)
        trainer = quiet(enable_checkpointing=None, callbacks=[finder, kept], max_epochs=2 if path is None else 3)
        trainer.fit(module, datamodule=Data(), ckpt_path=path)
        found.append((module.lr, trainer.optimizers[0].param_groups[0]["lr"], finder.optimal_lr is not None))
    (rate, _, _), (again, used, tested) = found
    assert rate == again
    assert used == pytest.approx(found[0][1] * 0.9)  # after one epoch more
    assert found[0][2]
    assert not tested
