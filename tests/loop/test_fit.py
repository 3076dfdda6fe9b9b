"""How long a fit is, and over what: epochs, steps, time, limits, loaders."""

from __future__ import annotations

import os
from collections import UserDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.callbacks import ModelCheckpoint
from lockstep.loggers import CSVLogger, TensorBoardLogger
from lockstep.utilities import CombinedLoader
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Recorder, Slope, Stream, Validated, acting, numbers, quiet


@pytest.mark.parametrize(
    ("flags", "batches", "stopped"),
    [
        ({"max_epochs": 2}, 10, "max_epochs=2 reached"),
        ({"max_epochs": 0}, 0, "max_epochs=0 reached"),
        ({"max_steps": 3}, 3, "max_steps=3 reached"),
        ({"max_steps": 0}, 0, "max_steps=0 reached"),
        ({"max_epochs": 1, "max_steps": 7}, 5, "max_epochs=1 reached"),
        ({"max_epochs": 3, "max_steps": 7}, 7, "max_steps=7 reached"),
        ({"max_epochs": 1, "limit_train_batches": 3}, 3, "max_epochs=1 reached"),
        ({"max_epochs": 1, "limit_train_batches": 0.5}, 2, "max_epochs=1 reached"),
        ({"max_epochs": 1, "limit_train_batches": 1.0}, 5, "max_epochs=1 reached"),
        ({"max_epochs": 1, "limit_train_batches": 99}, 5, "max_epochs=1 reached"),
        ({"max_epochs": 1, "limit_train_batches": 0}, 0, "no training batches"),
        ({"fast_dev_run": True}, 1, "max_epochs=1 reached"),
        ({"fast_dev_run": 3}, 3, "max_epochs=1 reached"),
        ({"fast_dev_run": True, "min_epochs": 4, "min_steps": 9}, 1, "max_epochs=1 reached"),
    ],
)
def test_a_fit_runs_as_long_as_its_flags_say(flags: dict[str, Any], batches: int, stopped: str) -> None:
    module = Slope()
    result = quiet(**flags).fit(module, numbers(5))
    assert (len(module.batches), result.stopped) == (batches, stopped)
    assert result.global_step == batches
    assert result.interrupted is False


@pytest.mark.parametrize("limit", [timedelta(0), "00:00:00:00", {"seconds": 0}])
def test_max_time_ends_a_fit_at_the_first_boundary_after_it(limit: Any) -> None:
    module = Validated()
    result = quiet(max_time=limit, max_epochs=3, num_sanity_val_steps=0).fit(module, numbers(5), numbers(1))
    assert (len(module.batches), result.stopped) == (1, "max_time=0 s reached")
    assert module.validated == [1]  # whoever stops early is validated, as in Lightning


def test_max_time_does_not_end_a_fit_that_is_quicker() -> None:
    module = Slope()
    result = quiet(max_time={"hours": 2}, max_epochs=2).fit(module, numbers(5))
    assert (len(module.batches), result.stopped) == (10, "max_epochs=2 reached")


def stop(module: Any, *args: Any) -> None:
    module.trainer.should_stop = True


def stops_at_once() -> Any:
    return acting(on_train_batch_end=stop)


@pytest.mark.parametrize(
    ("flags", "batches"),
    [
        ({}, 1),
        ({"min_epochs": 2}, 10),
        ({"min_steps": 3}, 5),  # as in Lightning, it asks for a first epoch
        ({"min_epochs": 0, "min_steps": 3}, 3),
        ({"min_steps": 7}, 7),
        ({"min_epochs": 1, "min_steps": 7}, 7),
        ({"accumulate_grad_batches": 2}, 2),  # a fit stops at a boundary, never inside a window
    ],
)
def test_nobody_stops_a_fit_before_its_least_length(flags: dict[str, Any], batches: int) -> None:
    module = stops_at_once()
    result = quiet(max_epochs=4, **flags).fit(module, numbers(5))
    assert (len(module.batches), result.stopped) == (batches, "trainer.should_stop was set")


def test_a_stop_that_waits_for_the_least_length_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "lockstep"):
        quiet(max_epochs=4, min_epochs=2).fit(stops_at_once(), numbers(5))
        assert caplog.text.count("a stop was requested; training continues until min_epochs=2 and min_steps=0") == 1
        caplog.clear()
        quiet(max_epochs=4).fit(stops_at_once(), numbers(5))
    assert "a stop was requested" not in caplog.text


def test_a_fit_may_be_stopped_before_it_begins() -> None:
    module = acting(on_train_start=stop)
    assert quiet(max_epochs=4).fit(module, numbers(5)).stopped == "trainer.should_stop was set"
    assert module.batches == []


def test_should_stop_of_one_fit_does_not_end_the_next() -> None:
    trainer = quiet(max_epochs=2)
    assert trainer.fit(stops_at_once(), numbers(5)).epochs == 0
    assert trainer.fit(Slope(), numbers(5)).epochs == 2


def test_fast_dev_run_tries_everything_once_and_logs_nowhere() -> None:
    class Talks(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_scalar("any call will do", 1.0)
            self.log("loss", 1.0)
            return super().training_step(batch, batch_idx)

    recorder, module = Recorder(), Talks()
    trainer = quiet(fast_dev_run=2, logger=recorder)
    trainer.fit(module, numbers(5), numbers(5))
    assert (recorder.sent, trainer.log_dir) == ([], None)
    assert (module.validated, trainer.num_val_batches, trainer.max_epochs) == ([2], [2], 1)


def test_the_epoch_counts_what_is_finished() -> None:
    seen: list[tuple[int, int]] = []
    module = acting(on_train_epoch_start=lambda m: seen.append((m.current_epoch, m.global_step)))
    trainer = quiet(max_epochs=3)
    assert trainer.fit(module, numbers(4)).epochs == 3
    assert seen == [(0, 0), (1, 4), (2, 8)]
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)


# -- loaders -----------------------------------------------------------------------------------------------


def test_several_loaders_come_as_the_nest_that_they_were_given_in() -> None:
    def see(module: Any, batch: Any, at: int) -> Any:
        seen.append({name: part.tolist() for name, part in batch.items()})
        return module.w * batch["long"].mean()

    seen: list[Any] = []
    quiet(max_epochs=1).fit(acting(training_step=see), {"long": numbers(3), "short": numbers(2)})
    assert seen == [{"long": [1.0], "short": [1.0]}, {"long": [2.0], "short": [2.0]}, {"long": [3.0], "short": [1.0]}]


@pytest.mark.parametrize("length", [True, False])
def test_iterable_data_sets_train_with_and_without_a_length(length: bool) -> None:
    class Known(Stream):
        def __len__(self) -> int:
            return self.count

    module = Slope()
    trainer = quiet(max_epochs=2)
    result = trainer.fit(module, DataLoader((Known if length else Stream)(5), batch_size=2))
    assert module.gradients == [1.5, 3.5, 5.0] * 2
    assert trainer.num_training_batches == (3 if length else float("inf"))
    assert result.epochs == 2


def test_a_stream_without_a_length_can_be_limited_to_batches_but_not_to_a_fraction() -> None:
    module = Slope()
    quiet(max_epochs=2, limit_train_batches=2).fit(module, DataLoader(Stream(5), batch_size=1))
    assert module.gradients == [1.0, 2.0] * 2
    with pytest.raises(MisconfigurationException, match=r"limit_train_batches=0.5"):
        quiet(max_epochs=1, limit_train_batches=0.5).fit(Slope(), DataLoader(Stream(5)))


def test_estimated_stepping_batches_counts_windows_of_all_epochs() -> None:
    def ask(module: Any) -> None:
        estimates.append(module.trainer.estimated_stepping_batches)

    estimates: list[float] = []
    for flags in (
        {"max_epochs": 3},
        {"max_epochs": 3, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "accumulate_grad_batches": {0: 5, 2: 1}},
        {"max_epochs": 3, "max_steps": 4},
        {"max_steps": 4},
    ):
        result = quiet(**flags).fit(acting(configure_optimizers=ask), numbers(5))
        assert result.global_step == estimates[-1]
    assert estimates == [15, 9, 7, 4, 4]


def test_the_accumulation_of_the_epoch_that_runs_is_told() -> None:
    seen: list[int] = []
    module = acting(on_train_epoch_start=lambda m: seen.append(m.trainer.accumulate_grad_batches))
    quiet(max_epochs=3, accumulate_grad_batches={0: 8, 2: 4}).fit(module, numbers(2))
    assert seen == [8, 8, 4]


def test_batches_reach_training_step_as_the_loader_made_them() -> None:
    made, got = [torch.ones(1, dtype=torch.float64) for _ in range(3)], []
    quiet(max_epochs=1).fit(acting(training_step=lambda m, batch, at: got.append(batch)), made)
    assert all(mine is theirs for mine, theirs in zip(made, got, strict=True))


class Named(Tensor):
    """A class derived from Tensor, as MONAI's images are, and DTensors."""


class LossOfAnotherClass(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx).as_subclass(Named)
        self.log("loss", loss)
        return loss


def test_a_loss_may_be_of_a_class_derived_from_tensor() -> None:
    """`on_train_batch_end` was to see it, and it was taken for a dict."""
    shown: list[Any] = []
    plain, module = Slope(), acting(LossOfAnotherClass, on_train_batch_end=lambda m, outputs, *_: shown.append(outputs))
    for each in (plain, module):
        each.lr = 0.1
        trainer = quiet(max_epochs=2)
        trainer.fit(each, numbers(4))
    assert module.w.item() == plain.w.item()
    assert [type(output["loss"]) for output in shown] == [Named] * 8
    assert trainer.callback_metrics["loss"].item() == shown[-1]["loss"].item()


def test_a_step_returns_any_mapping() -> None:
    class Mapped(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return UserDict(loss=super().training_step(batch, batch_idx), more=batch)

    shown: list[Any] = []
    module = acting(Mapped, on_train_batch_end=lambda m, outputs, *_: shown.append(outputs))
    module.lr = 0.5
    quiet(max_epochs=1).fit(module, numbers(2))
    assert module.w == -1.5
    assert shown[-1] == {"loss": -1.0, "more": 2.0}


# -- What the page about Lightning's names says works, where it did not ------------------------------------------


def loaders(mode: Any) -> CombinedLoader:
    return CombinedLoader({"a": numbers(4), "b": numbers(2)}, mode)


class Together(Slope):
    """Its evaluations take batches of several loaders."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch_idx)

    test_step = predict_step = validation_step


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 2), ("max_size", 4), ("max_size_cycle", 4)])
def test_batches_of_loaders_side_by_side_are_told_for_each(mode: str, batches: int) -> None:
    trainer, module = quiet(max_epochs=1), Together()
    trainer.fit(module, numbers(2), loaders(mode))
    assert trainer.num_val_batches == [4, 2]
    assert trainer.num_sanity_val_batches == [2, 2]
    assert module.validated == [0, 1, *range(batches)]
    trainer.test(module, loaders(mode), verbose=False)
    trainer.predict(module, loaders(mode))
    assert trainer.num_test_batches == trainer.num_predict_batches == [4, 2]


def test_a_fit_that_goes_on_behind_an_epoch_begins_with_the_next_one(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    quiet(max_epochs=2, callbacks=keeps, enable_checkpointing=True).fit(Slope(), numbers(2))
    seen: list[tuple[str, int]] = []
    module = acting(
        on_train_start=lambda m: seen.append(("train", m.current_epoch)),
        on_train_epoch_start=lambda m: seen.append(("epoch", m.current_epoch)),
    )
    quiet(max_epochs=2).fit(module, numbers(2), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert seen == [("train", 1), ("epoch", 1)]


def test_a_run_that_is_past_its_last_epoch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "done.ckpt"
    trainer = quiet(max_epochs=3)
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=r"has finished 3 epochs, more than Trainer\(max_epochs=2\)"):
        quiet(max_epochs=2).fit(Slope(), numbers(2), ckpt_path=path)
    with pytest.warns(UserWarning, match="nothing left to train"):
        quiet(max_epochs=3).fit(Slope(), numbers(2), ckpt_path=path)


class Sized(Slope):
    """Has an argument."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_an_argument_that_init_does_not_take_is_left_out_with_a_word(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Sized(2), numbers(2))
    trainer.save_checkpoint(tmp_path / "sized.ckpt")
    with pytest.warns(UserWarning, match=r"load_from_checkpoint\(widht=\.\.\.\).*the value is ignored"):
        assert Sized.load_from_checkpoint(tmp_path / "sized.ckpt", widht=3).hparams.width == 2


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_file_of_hyperparameters_is_there_without_any(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    trainer = quiet(max_epochs=1, logger=logger)
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(tmp_path / "at.ckpt")
    Slope.load_from_checkpoint(tmp_path / "at.ckpt", hparams_file=os.path.join(logger.log_dir, "hparams.yaml"))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_loggers_own_name_and_folder_say_where_it_writes(kind: Any, tmp_path: Path) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        @property
        def name(self) -> str:
            return "mine"

        @property
        def save_dir(self) -> str:
            return str(tmp_path / "elsewhere")

    logger = Own(tmp_path, name="other")
    assert logger.log_dir == str(tmp_path / "elsewhere" / "mine" / "version_0")


def test_off_is_no_sanity_check() -> None:
    assert quiet(num_sanity_val_steps=False).num_sanity_val_steps == 0
    with pytest.raises(MisconfigurationException, match="num_sanity_val_steps=True"):
        quiet(num_sanity_val_steps=True)
