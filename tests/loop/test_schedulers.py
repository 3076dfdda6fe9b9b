"""Learning rate schedulers: when they are stepped, and by what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from lockstep.loop.optimizers import parse
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, numbers, quiet


class Scheduled(Slope):
    """Notes how often its scheduler was stepped before each batch."""

    def __init__(self, **config: Any) -> None:
        super().__init__(lr=1.0)
        self.config = config
        self.counts: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts.append(self.lr_schedulers()._step_count - 1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **self.config}}


@pytest.mark.parametrize(
    ("config", "accumulate", "counts"),
    [
        ({}, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"interval": "epoch", "frequency": 2}, 1, [0] * 8),
        ({"interval": "step"}, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"interval": "step", "frequency": 2}, 1, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"interval": "step"}, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
    ],
)
def test_a_scheduler_is_stepped_at_its_interval(config: dict[str, Any], accumulate: int, counts: list[int]) -> None:
    module = Scheduled(**config)
    quiet(max_epochs=2, accumulate_grad_batches=accumulate).fit(module, numbers(4))
    assert module.counts == counts


def test_a_scheduler_is_stepped_before_the_validation_of_its_epoch() -> None:
    class Watches(Scheduled):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(self.lr_schedulers()._step_count - 1)

    module = Watches()
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(module, numbers(2), numbers(1))
    assert module.validated == [1, 2]


class Plateau(Slope):
    """Halves its learning rate whenever ``name`` does not fall; notes the rate before each batch."""

    def __init__(self, value: float = 1.0, **config: Any) -> None:
        super().__init__()
        self.value, self.config = value, config
        self.rates: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step_loss", self.value - 0.1 * self.global_rank * batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.value)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.config}}


@pytest.mark.parametrize(
    ("config", "epochs", "batches"),
    [({"monitor": "val_loss"}, 4, 1), ({"monitor": "step_loss", "interval": "step"}, 1, 4)],
)
def test_a_plateau_is_judged_by_its_monitor(config: dict[str, Any], epochs: int, batches: int) -> None:
    module = Plateau(**config)
    quiet(max_epochs=epochs).fit(module, numbers(batches), numbers(1))
    assert module.rates == [8.0, 8.0, 4.0, 2.0]


def test_a_monitor_that_was_never_logged_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"'val_los'.*Available metrics are.*'val_loss'.*strict=False"):
        quiet(max_epochs=1).fit(Plateau(monitor="val_los"), numbers(1), numbers(1))


def test_unless_the_scheduler_is_not_strict() -> None:
    """It was told of by another class than Lightning's, which a user's filter is for."""
    module = Plateau(monitor="val_los", strict=False)
    with pytest.warns(RuntimeWarning, match="'val_los' was not logged"):
        quiet(max_epochs=3).fit(module, numbers(1), numbers(1))
    assert module.rates == [8.0] * 3


def test_a_module_may_step_its_scheduler_itself() -> None:
    class Own(Plateau):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            given.append((type(scheduler).__name__, float(metric)))

    given: list[Any] = []
    quiet(max_epochs=2).fit(Own(monitor="val_loss"), numbers(1), numbers(1))
    assert given == [("ReduceLROnPlateau", 1.0)] * 2


def test_manual_optimization_leaves_schedulers_to_the_user() -> None:
    class ByHand(Scheduled):
        def __init__(self) -> None:
            super().__init__(interval="step")
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step()

    module = ByHand()
    quiet(max_epochs=1).fit(module, numbers(3))
    assert module.counts == [0, 0, 0]


# -- what configure_optimizers may return ------------------------------------------------------------------


def make() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, LambdaLR(optimizer, lambda _: 1.0)


OPTIMIZER, SCHEDULER = make()


@pytest.mark.parametrize(
    ("returned", "schedulers"),
    [
        (OPTIMIZER, 0),
        ([OPTIMIZER], 0),
        ((OPTIMIZER,), 0),
        ({"optimizer": OPTIMIZER}, 0),
        ({"optimizer": OPTIMIZER, "lr_scheduler": SCHEDULER}, 1),
        ({"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": SCHEDULER, "interval": "step"}}, 1),
        ([{"optimizer": OPTIMIZER, "lr_scheduler": SCHEDULER}], 1),
        (([OPTIMIZER], [SCHEDULER]), 1),
        (([OPTIMIZER], [{"scheduler": SCHEDULER}, SCHEDULER]), 2),
        (([OPTIMIZER], []), 0),
        (([OPTIMIZER], SCHEDULER), 1),
    ],
)
def test_shapes_that_lightning_documents(returned: Any, schedulers: int) -> None:
    optimizers, configs = parse(returned, automatic=True, custom_scheduler_step=False)
    assert optimizers == [OPTIMIZER]
    assert [config.scheduler for config in configs] == [SCHEDULER] * schedulers


class Odd:
    """No torch scheduler, though it has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("adam", r"returned str \('adam'\); it must return an optimizer"),
        ([], r"returned list \(\[\]\)"),
        ({"lr_scheduler": SCHEDULER}, '"optimizer"'),
        ([OPTIMIZER, make()[0]], "multiple optimizers \\(2 here.*automatic_optimization = False"),
        (([OPTIMIZER], [{"interval": "step"}]), 'must have the key "scheduler"'),
        (([OPTIMIZER], [{"scheduler": SCHEDULER, "interval": "batch"}]), '"interval" is \'batch\'.*"step" or "epoch"'),
        (([OPTIMIZER], [{"scheduler": SCHEDULER, "frequency": 0}]), '"frequency" is 0'),
        (([OPTIMIZER], [ReduceLROnPlateau(OPTIMIZER)]), 'must include a monitor when a `ReduceLROnPlateau`.*"monitor"'),
        (([OPTIMIZER], [make()[1]]), "belongs to an optimizer that `configure_optimizers` did not return"),
        (([OPTIMIZER], [object()]), "no `state_dict`"),
        (([OPTIMIZER], [Odd()]), "override `lr_scheduler_step`"),
        ((OPTIMIZER, SCHEDULER), r"\(SGD, LambdaLR\): put the optimizer.*`return \[optimizer\], \[scheduler\]`"),
        ([OPTIMIZER, {"scheduler": SCHEDULER}], r"\(SGD, dict\).*`return \[optimizer\], \[scheduler\]`"),
    ],
)
def test_other_shapes_are_refused_with_what_is_wrong(returned: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        parse(returned, automatic=True, custom_scheduler_step=False)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            {"optimizer": OPTIMIZER, "lr_scheduler": {"scheduler": SCHEDULER, "intervall": "step", "x": 1}},
            r"dict has unknown keys.*'intervall' \(did you mean 'interval'\?\), 'x'; the known keys are.*'frequency'",
        ),
        ({"optimizer": OPTIMIZER, "lr_schedulers": SCHEDULER}, r"'lr_schedulers' \(did you mean 'lr_scheduler'\?\)"),
    ],
)
def test_a_misspelt_key_is_told_its_nearest(returned: Any, said: str) -> None:
    with pytest.warns(RuntimeWarning, match=said):
        parse(returned, automatic=True, custom_scheduler_step=False)


def test_any_scheduler_will_do_for_who_steps_it_himself() -> None:
    assert parse(([OPTIMIZER], [Odd()]), automatic=True, custom_scheduler_step=True)[1][0].interval == "epoch"
