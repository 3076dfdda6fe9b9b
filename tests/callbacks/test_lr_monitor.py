"""LearningRateMonitor: names, intervals and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from lockstep.callbacks.lr_monitor import LearningRateMonitor
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.fake_trainer import FakeTrainer


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def config(optimizer: Optimizer, interval: str = "epoch", name: str | None = None) -> Any:
    scheduler = SimpleNamespace(optimizer=optimizer)
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name)


def play(monitor: LearningRateMonitor, optimizers: list, configs: list, **settings: Any) -> list:
    trainer = FakeTrainer(
        [monitor], max_epochs=1, num_training_batches=4, optimizers=optimizers, lr_scheduler_configs=configs, **settings
    )
    trainer.fit(nn.Linear(1, 1))
    return trainer.loggers[0].written


def test_names_follow_classes_groups_and_the_names_that_users_gave() -> None:
    two_groups = [{"params": [parameter()]}, {"params": [parameter()], "name": "head"}]
    optimizers: list[Optimizer] = [
        Adam([parameter()]),
        Adam([parameter()]),
        SGD(two_groups, lr=0.1),
        SGD([{"params": [parameter()], "name": "only"}], lr=0.1),
        Adam([parameter()]),
    ]
    monitor = LearningRateMonitor()
    play(monitor, optimizers, [config(optimizers[0]), config(optimizers[4], name="mine")])
    names = ["lr-Adam", "mine", "lr-Adam-1", "lr-SGD/pg1", "lr-SGD/head", "lr-SGD-1/only"]
    assert list(monitor.lrs) == names


def test_each_scheduler_is_written_at_its_own_interval() -> None:
    by_step, by_epoch = SGD([parameter()], lr=0.1), Adam([parameter()], lr=0.2)
    written = play(
        LearningRateMonitor(),
        [by_step, by_epoch],
        [config(by_step, "step"), config(by_epoch, "epoch")],
        log_every_n_steps=2,
    )
    assert written == [(0, {"lr-Adam": 0.2}), (1, {"lr-SGD": 0.1}), (3, {"lr-SGD": 0.1})]


def test_a_step_of_several_micro_batches_is_written_once() -> None:
    written = play(LearningRateMonitor("step"), [SGD([parameter()], lr=0.1)], [], accumulate_grad_batches=2)
    assert [step for step, _ in written] == [0, 1]


def test_a_fit_that_logs_no_steps_writes_epochs_alone() -> None:
    """log_every_n_steps=0 was a ZeroDivisionError in the first batch."""
    optimizer = SGD([parameter()], 0.1)
    written = play(LearningRateMonitor(), [optimizer], [config(optimizer)], log_every_n_steps=0)
    assert written == [(0, {"lr-SGD": 0.1})]


def test_values_follow_the_scheduler() -> None:
    optimizer = SGD([parameter()], lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    monitor = LearningRateMonitor("step")
    real = SimpleNamespace(scheduler=scheduler, interval="step", name=None)
    trainer = FakeTrainer(
        [monitor], max_epochs=1, num_training_batches=3, optimizers=[optimizer], lr_scheduler_configs=[real]
    )

    def step(trainer: FakeTrainer, batch_idx: int) -> None:
        optimizer.step()
        scheduler.step()

    trainer.fit(nn.Linear(1, 1), step)
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5, 0.25]}
    assert trainer.callback_metrics["lr-SGD"] == 0.25


def test_steps_of_a_fit_that_is_to_stop_were_missing() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    monitor = LearningRateMonitor("step")
    trainer = FakeTrainer([monitor], optimizers=[optimizer], log_every_n_steps=3)
    for trainer.global_step in range(5):
        trainer.should_stop = trainer.global_step > 0
        monitor.on_train_batch_start(trainer, nn.Linear(1, 1), None, trainer.global_step)  # type: ignore[arg-type]
    assert [step for step, _ in trainer.loggers[0].written] == [1, 2, 3, 4]


def test_momentum_and_weight_decay() -> None:
    adam = Adam([parameter()], betas=(0.8, 0.9), weight_decay=0.1)
    sgd = SGD([parameter()], lr=0.1, momentum=0.7)
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    (_, values), *_ = play(monitor, [adam, sgd], [])
    assert values["lr-Adam-momentum"] == 0.8
    assert values["lr-SGD-momentum"] == 0.7
    assert values["lr-Adam-weight_decay"] == 0.1
    assert monitor.last_momentum_values == {"lr-Adam-momentum": 0.8, "lr-SGD-momentum": 0.7}


def test_what_it_refuses() -> None:
    with pytest.raises(MisconfigurationException, match="logging_interval='batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="needs a logger"):
        play(LearningRateMonitor(), [], [], loggers=[])
    twice = SGD([{"params": [parameter()], "name": "a"}, {"params": [parameter()], "name": "a"}], lr=0.1)
    with pytest.raises(MisconfigurationException, match="share the name 'a'"):
        play(LearningRateMonitor(), [twice], [])
