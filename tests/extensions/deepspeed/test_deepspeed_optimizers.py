"""What users do with parameters, groups and rates around DeepSpeed's engine, against one process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lockstep.strategies import DeepSpeedStrategy
from tests.equivalence.models import Plain, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]
STAGES = (1, 2, 3)


class Two(Plain):
    """Two groups, chosen by shape as nanoGPT does; a schedule that changes the rate in each step."""

    optimizer = "AdamW"
    schedule = "exponential"

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() < 2], "lr": 0.003},
        ]
        made = OPTIMIZERS[self.optimizer](groups)
        return {"optimizer": made, "lr_scheduler": {"scheduler": SCHEDULES[self.schedule](made), "interval": "step"}}


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda groups: optim.Adadelta(groups, lr=1.0),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1, lr_decay=0.01),
    "Adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.01),
    "Adamax": lambda groups: optim.Adamax(groups, lr=0.01),
    "ASGD": lambda groups: optim.ASGD(groups, lr=0.01, t0=2),
    "NAdam": lambda groups: optim.NAdam(groups, lr=0.01),
    "RAdam": lambda groups: optim.RAdam(groups, lr=0.01),
    "RMSprop": lambda groups: optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.9),
    "Rprop": lambda groups: optim.Rprop([{"params": group["params"]} for group in groups], lr=0.01),
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "maximized": lambda groups: optim.AdamW(groups, lr=0.01, maximize=True, foreach=True),
    "fused": lambda groups: optim.AdamW(groups, lr=0.01, fused=True),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda made: optim.lr_scheduler.ExponentialLR(made, 0.9),
    "one cycle": lambda made: optim.lr_scheduler.OneCycleLR(made, 0.02, total_steps=40),
    "by group": lambda made: optim.lr_scheduler.LambdaLR(made, [lambda step: 0.9**step, lambda step: 1.0]),
}


def trained(kind: type[Plain], stage: int | None, attributes: dict[str, Any] | None = None) -> dict[str, Tensor] | str:
    world = 1 if stage is None else 2
    torch.manual_seed(3)
    module = kind()
    vars(module).update(attributes or {})
    strategy: Any = "auto" if stage is None else DeepSpeedStrategy(stage=stage)
    trainer = quiet(strategy=strategy, devices=world, max_epochs=3)
    trainer.seed = 5
    try:
        trainer.fit(module, rows(16)(4 // world))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


def check(ranks: RankPool, kind: type[Plain], stage: int, **attributes: Any) -> None:
    (expected,) = ranks(1).run(trained, kind, None, attributes, group=False)
    assert not isinstance(expected, str), expected
    for found in ranks(2).run(trained, kind, stage, attributes, timeout=100):
        assert not isinstance(found, str), found
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=2e-6, msg=name)


EVERY_DAY = [("AdamW", "exponential", 3), ("Adagrad", "by group", 2)]
ALL = [(name, "exponential", stage) for name in OPTIMIZERS for stage in STAGES] + [
    (name, schedule, stage) for name in ("AdamW", "SGD") for schedule in ("one cycle", "by group") for stage in STAGES
]


@pytest.mark.parametrize(("name", "schedule", "stage"), EVERY_DAY)
def test_groups_by_shape_with_a_schedule(ranks: RankPool, name: str, schedule: str, stage: int) -> None:
    """In stage 3 parameters had no shape, so that all were in one group; Adagrad's two groups ended in a raw error."""
    check(ranks, Two, stage, optimizer=name, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "stage"), [case for case in ALL if case not in EVERY_DAY])
def test_each_optimizer_of_torch(ranks: RankPool, name: str, schedule: str, stage: int) -> None:
    check(ranks, Two, stage, optimizer=name, schedule=schedule)


class Frozen(Plain):
    """A layer is frozen after the first epoch, and one is never used."""

    optimizer = "AdamW"

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(6, 4)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch < 1)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "SGD":
            return optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        return OPTIMIZERS[self.optimizer]([{"params": list(self.parameters()), "weight_decay": 0.1}])


@pytest.mark.parametrize(("name", "stage"), [("AdamW", 3), ("SGD", 2)])
def test_what_is_frozen_in_a_fit_stays_as_it_is(ranks: RankPool, name: str, stage: int) -> None:
    """Momentum and decay went on moving it, and a layer that nothing used."""
    check(ranks, Frozen, stage, optimizer=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_frozen_stays_under_each_optimizer(ranks: RankPool, name: str, stage: int) -> None:
    check(ranks, Frozen, stage, optimizer=name)


class Thawed(Frozen):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_layer_that_goes_on_behind_a_count_of_steps_is_refused(ranks: RankPool, stage: int) -> None:
    """AdamW counts one step for all of a group: the layer's update would not be that of one process."""
    for said in ranks(2).run(trained, Thawed, stage, timeout=100):
        assert isinstance(said, str)
        assert "parameter 'net.0." in said
        assert "parameter group of their own" in said
    check(ranks, Thawed, stage, optimizer="SGD")


class Mixed(Plain):
    """Adapters in float32 beside trained weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].to(torch.bfloat16)


def test_trained_parameters_of_two_types_are_refused(ranks: RankPool) -> None:
    for stage in STAGES:
        for said in ranks(2).run(trained, Mixed, stage, timeout=100):
            assert isinstance(said, str)
            assert "parameter 'net.0.weight' is torch.bfloat16 and 'net.2.weight' is torch.float32" in said
