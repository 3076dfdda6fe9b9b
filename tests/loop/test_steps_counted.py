"""What counts as a step: one past the wrapper does, one that 16-mixed left out does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import LightningModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import SingleDeviceStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Around(torch.optim.SGD):
    """Holds another optimizer, whose step is a part of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)

    def second_step(self) -> None:
        self.base_optimizer.step()


class Steps(LightningModule):
    """Steps its optimizer in the way that it is told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.w, self.how = nn.Parameter(torch.zeros((), dtype=torch.float64)), how

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.how != "raw")
        optimizer.zero_grad()
        self.manual_backward((self.w * batch).mean())
        if self.how == "own":
            self.own.step()
        elif self.how == "inner":
            optimizer.optimizer.step()
        elif self.how == "second step":
            optimizer.second_step()
        else:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        kind = Around if self.how in ("second step", "around") else torch.optim.SGD
        self.own = kind(self.parameters(), lr=1.0)
        return self.own


HOW = ["wrapped", "raw", "inner", "own", "second step", "around"]


@pytest.mark.parametrize("how", HOW)
def test_each_step_counts_whoever_makes_it(how: str, tmp_path: Path) -> None:
    """`max_steps` ended nothing and no checkpoint was written, without a word."""
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = quiet(max_steps=5, max_epochs=-1, enable_checkpointing=True, callbacks=[keep])
    module = Steps(how)
    assert trainer.fit(module, numbers(4)).global_step == 5
    assert module.w.item() == -11.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    assert not module.own._optimizer_step_post_hooks  # type: ignore[attr-defined]  # nothing is left behind


def counted(how: str) -> int:
    return on_ranks(max_steps=3, max_epochs=-1).fit(Steps(how), numbers(4)).global_step


def test_on_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(counted, "raw") == [3, 3]


def test_an_optimizer_that_the_trainer_does_not_know_is_told_in_the_first_epoch() -> None:
    class Hides(Steps):
        def configure_optimizers(self) -> Any:
            super().configure_optimizers()

    with pytest.warns(UserWarning, match=r"in this epoch no optimizer was stepped .* stays 0.*configure_optimizers"):
        quiet(max_epochs=2).fit(Hides("own"), numbers(2))


# -- 16-mixed


class Overflows(LightningModule):
    """The loss of the batches that it is told is infinite."""

    def __init__(self, batches: Any) -> None:
        super().__init__()
        self.batches, self.rates, self.counted = batches, [], []  # type: ignore[var-annotated]
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch.float()[:, None]).float().mean() / 64
        return loss * torch.inf if batch_idx in self.batches else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counted.append(self.trainer.global_step)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": halved, "interval": "step"}]


def scheduled(ranks: bool, **flags: Any) -> tuple[list[int], list[float]]:
    module = Overflows({0, 1, 3})
    (on_ranks if ranks else quiet)(precision="16-mixed", max_epochs=1, **flags).fit(module, numbers(12, 2))
    return module.counted, module.rates


def test_schedules_and_global_step_wait_for_steps_that_were_left_out(ranks: RankPool) -> None:
    found = [0, 0, 1, 1, 2, 3], [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]
    assert scheduled(False) == found
    assert ranks(2).run(halves) == [([0, 0, 1], [1.0, 1.0, 0.5])] * 2


def halves() -> tuple[list[int], list[float]]:
    return scheduled(True)


def test_accumulated() -> None:
    assert scheduled(False, accumulate_grad_batches=2) == ([0, 0, 0, 0, 0, 1], [1.0] * 5 + [0.5])


class Leaves(SingleDeviceStrategy):
    """An engine with a loss scale of its own, as DeepSpeed's: it leaves its first two steps out."""

    made = 0

    def step(self, optimizer: Any, closure: Any = None, **options: Any) -> Any:
        self.made += 1
        self.left_out = self.made < 3
        return None if self.left_out else super().step(optimizer, closure, **options)


def test_an_engine_that_leaves_steps_out_itself() -> None:
    module = Overflows(())
    quiet(strategy=Leaves(), max_epochs=1).fit(module, numbers(8, 2))
    assert (module.counted, module.rates) == ([0, 0, 1, 2], [1.0, 1.0, 0.5, 0.25])


def test_a_loss_that_is_never_finite_ends_the_fit() -> None:
    """With `max_steps` alone it would go on for ever, and change nothing."""
    with pytest.raises(MisconfigurationException, match=r"16-mixed.*last 100 steps were skipped.*detect_anomaly"):
        quiet(precision="16-mixed", max_steps=3, max_epochs=-1).fit(Overflows(range(10)), numbers(10))
