"""One name that several things are logged under: loaders of an evaluation, and metrics that are made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

torchmetrics = pytest.importorskip("torchmetrics")


class Shares(Slope):
    """Logs the numbers of two loaders as one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for number in batch:  # each sample by itself, so that sums do not depend on the number of ranks
            self.log("v", number + 10 * dataloader_idx, add_dataloader_idx=False, batch_size=1, **self.options)
        self.log("own", float(dataloader_idx))

    test_step = validation_step


def shown(start: Any = quiet, **options: Any) -> tuple[float, list[Any]]:
    module, loaders = Shares(**options), [numbers(4, 2), numbers(2, 2)]
    trainer = start(max_epochs=1)
    trainer.fit(module, numbers(2), loaders)
    tested = trainer.test(module, loaders, verbose=False)
    return trainer.callback_metrics["v"].item(), [part["v"] for part in tested]


CASES = [({}, 33 / 6), ({"reduce_fx": "sum"}, 33.0), ({"reduce_fx": "max"}, 12.0), ({"reduce_fx": "min"}, 1.0)]


@pytest.mark.parametrize(("options", "value"), CASES)
def test_loaders_that_log_one_name_show_the_value_over_all(options: dict[str, Any], value: float) -> None:
    """The last loader's was shown, and ModelCheckpoint ranked by it."""
    assert shown(**options) == (value, [value, value])


def on_two() -> list[Any]:
    return [shown(on_ranks, **options) for options, _ in CASES]


def test_on_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(on_two) == [[(value, [value, value]) for _, value in CASES]] * 2


def test_loaders_that_mean_different_things_by_one_name_are_refused() -> None:
    class Differ(Slope):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("v", 1.0, add_dataloader_idx=False, reduce_fx=["mean", "sum"][dataloader_idx])

    with pytest.raises(MisconfigurationException, match=r"'v'.*one name in several ways.*its own name"):
        quiet().validate(Differ(), [numbers(1), numbers(1)])


class Objects(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(torchmetrics.MeanMetric() for _ in range(2))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.each[dataloader_idx].update(batch)
        self.log("v", self.each[dataloader_idx], add_dataloader_idx=False)  # type: ignore[arg-type]


def test_so_are_two_metric_objects() -> None:
    with pytest.raises(MisconfigurationException, match=r"'v'.*another torchmetrics object"):
        quiet().validate(Objects(), [numbers(1), numbers(1)])


class New(Slope):
    """Makes its metric in each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metric = torchmetrics.MeanMetric()
        metric(torch.tensor(float(batch_idx)))
        self.log("m", metric, **self.options)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_is_made_anew_in_each_step_is_refused() -> None:
    """The last batch's value was shown for the epoch's."""
    with pytest.raises(MisconfigurationException, match=r"'m', <MeanMetric>.*attribute of the module"):
        quiet(max_epochs=1).fit(New(on_step=False, on_epoch=True), numbers(3))


def test_a_value_of_its_step_alone_is_right() -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(New(), numbers(3))
    assert trainer.callback_metrics["m"] == 2.0
