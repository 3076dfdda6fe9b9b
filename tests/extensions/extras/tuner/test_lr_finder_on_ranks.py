"""lr_find on several ranks finds what one process finds with their batches together, and leaves nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import LearningRateFinder
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from lockstep.tuner import Tuner
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SAMPLES = 61  # of which the last micro-batch leaves a rank out


class Rated(LightningModule):
    """With a rate, momentum and running statistics."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.add_(1)
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def loader(batch: int) -> Any:
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)


def searched(threshold: float | None, accumulate: int = 1) -> Any:
    """Rates, losses, the suggestion, what was left, and the weights of a fit that follows."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module = Rated()
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = quiet(devices=ranks, strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = Tuner(trainer).lr_find(
        module, loader(4 // ranks), num_training=40, early_stop_threshold=threshold, max_lr=2.0, min_lr=1e-4
    )
    assert found is not None
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.lr == (found.suggestion() or 0.01)
    trainer.fit(module, loader(4 // ranks))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    return found.results, found.suggestion(), trainer.global_step, weights


@pytest.mark.parametrize(("threshold", "accumulate"), [(None, 1), (1.5, 1), (None, 2)])
def test_two_ranks_find_the_rate_of_one_process(ranks: RankPool, threshold: float | None, accumulate: int) -> None:
    expected = searched(threshold, accumulate)
    assert (len(expected[0]["lr"]) < 40) is (threshold is not None)
    for found in ranks(2).run(searched, threshold, accumulate, timeout=60):
        assert found[0]["lr"] == pytest.approx(expected[0]["lr"], rel=1e-12)
        assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-9)
        assert found[1:3] == expected[1:3]
        torch.testing.assert_close(found[3], expected[3], rtol=0, atol=1e-12)


def fitted_with_a_finder() -> Any:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module, finder = Rated(), LearningRateFinder(min_lr=1e-4, max_lr=2.0, num_training_steps=30)
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = quiet(devices=ranks, strategy=strategy, max_epochs=2, callbacks=finder)
    trainer.fit(module, loader(4 // ranks))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert finder.optimal_lr is not None
    return rate, trainer.global_step, [parameter.detach().clone() for parameter in module.parameters()]


def test_a_fit_on_two_ranks_goes_on_with_the_rate_that_it_found(ranks: RankPool) -> None:
    expected = fitted_with_a_finder()
    for found in ranks(2).run(fitted_with_a_finder, timeout=60):
        assert found[:2] == expected[:2]
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-12)


def refused(strategy: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        Tuner(quiet(devices=2, strategy=strategy)).lr_find(Rated(), loader(2))
    return str(error.value)


def test_ranks_whose_steps_cannot_be_undone_are_refused(ranks: RankPool) -> None:
    assert "FSDPStrategy on 2 ranks cannot" in ranks(2).run(refused, "fsdp", timeout=60)[0]
    assert "without shard_optimizer" in ranks(2).run(refused, DDPStrategy(shard_optimizer=True), timeout=60)[0]
    assert "Use the callback LearningRateFinder()" in refused("ddp_spawn")
