"""How long a fit is, and over what: epochs, steps, time, limits, loaders."""

from __future__ import annotations

from collections import UserDict
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

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
