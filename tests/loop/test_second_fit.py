"""Another fit of the same Trainer: counters go on, as in Lightning."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

import lockstep
from tests.loop.pieces import QUIET, Slope, Validated, acting, numbers, quiet


def notes(library: Any) -> Any:
    """A module of a library that notes where each step and epoch begins, and can stop or fail."""

    class Module(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.said: list[Any] = []
            self.stop_at = self.fail_at = -1

        def on_fit_start(self) -> None:
            self.said.append("fit")

        def on_train_start(self) -> None:
            self.said.append("start")

        def on_train_epoch_start(self) -> None:
            self.said.append(f"epoch {self.current_epoch}")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == self.fail_at:
                raise RuntimeError("as planned")
            self.said.append((self.current_epoch, self.global_step, batch_idx))
            return self.w * batch.sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == self.stop_at:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def again(trainer: Any, module: Any, other: Any) -> None:
    trainer.fit(module, numbers(3))
    trainer.fit(module, numbers(3))


def raised(trainer: Any, module: Any, other: Any) -> None:
    trainer.fit(module, numbers(3))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, numbers(3))


def another_module(trainer: Any, module: Any, other: Any) -> None:
    trainer.fit(module, numbers(3))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(other, numbers(3))


def stopped(trainer: Any, module: Any, other: Any) -> None:
    module.stop_at = 2
    trainer.fit(module, numbers(3))
    module.stop_at = -1
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, numbers(3))


def more_steps(trainer: Any, module: Any, other: Any) -> None:
    loop = trainer.fit_loop if isinstance(trainer, lockstep.Trainer) else trainer.fit_loop.epoch_loop
    trainer.fit_loop.max_epochs, loop.max_steps = 9, 4
    trainer.fit(module, numbers(3))
    loop.max_steps = 7
    trainer.fit(module, numbers(3))


def failed(trainer: Any, module: Any, other: Any) -> None:
    trainer.fit_loop.max_epochs = 3
    module.fail_at = 4
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.fit(module, numbers(3))
    module.fail_at = -1
    trainer.fit(module, numbers(3))


@pytest.mark.parametrize("play", [again, raised, another_module, stopped, more_steps, failed])
def test_a_second_fit_goes_on_as_lightnings_does(lightning: Any, play: Any) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = []
    for library in (lockstep, lightning):
        trainer, module, other = library.Trainer(**QUIET, max_epochs=1), notes(library), notes(library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            play(trainer, module, other)
        seen.append((module.said, other.said, trainer.current_epoch, trainer.global_step))
    assert seen[0] == seen[1]


def test_the_time_of_a_fit_counts_from_its_own_beginning() -> None:
    trainer = quiet(max_epochs=1, max_time={"hours": 1})
    trainer.fit(Slope(), numbers(2))
    trainer.fit_loop.progress.seconds = 4000.0  # as if it had been a long one
    trainer.max_epochs = 2
    assert trainer.fit(Slope(), numbers(2)).stopped == "max_epochs=2 reached"


def test_a_second_fit_that_was_stopped_reported_the_reason_of_the_first() -> None:
    trainer, module = quiet(max_epochs=1), notes(lockstep)
    assert trainer.fit(module, numbers(3)).stopped == "max_epochs=1 reached"
    trainer.max_epochs, module.stop_at = 5, 5
    assert trainer.fit(module, numbers(3)).stopped == "trainer.should_stop was set"


def test_a_second_fit_validates_on_its_own_loaders() -> None:
    seen: list[float] = []
    module = acting(Validated, validation_step=lambda m, batch, at: seen.append(batch.item()))
    trainer = quiet(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, numbers(1), numbers(2))
    trainer.max_epochs = 2
    trainer.fit(module, numbers(1), numbers(3))
    assert seen == [1.0, 2.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_in_processes_of_its_own(strategy: str) -> None:
    trainer, module = quiet(strategy=strategy, devices=2, max_epochs=1), Slope(lr=0.1)
    assert trainer.fit(module, numbers(4)).epochs == 1
    assert module.w.item() == pytest.approx(-0.1 * (1.5 + 3.5), rel=1e-12)  # means over the ranks' samples
    trainer.fit_loop.max_epochs = 3
    result = trainer.fit(module, numbers(4))
    assert (result.epochs, result.global_step, trainer.current_epoch) == (3, 6, 3)
    assert module.w.item() == pytest.approx(-0.1 * (1.5 + 3.5) * 3, rel=1e-12)
