"""What a step has logged last is in a checkpoint that is saved at the end of its batch, though no logger has it yet.

It can be read when a failure has ended the run, too.

Random programs found it: a run that is saved behind its last batch, and goes on, showed the value of the batch before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep import LightningModule
from lockstep.loop.logged_entry import merged
from tests.loop.pieces import SaveAt, quiet
from tests.tools.pool import RankPool

BATCHES = 6


class Numbers(LightningModule):
    """Logs the mean of each batch, which no other batch has, in every way that a step may."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        size = len(batch)
        if not self.skips or batch_idx % 4 == 0:
            self.log("step", batch.mean(), batch_size=size)
        self.log("both", batch.mean(), on_step=True, on_epoch=True, batch_size=size)
        self.log("largest", batch.max(), on_step=True, on_epoch=True, reduce_fx="max", batch_size=size)
        return self(batch[:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    strategy: Any, devices: int, skips: bool = False, save: tuple[Path, int] | None = None, load: Path | None = None
) -> dict[str, float]:
    """What ``callback_metrics`` show in the end; saved behind a batch, and stopped there, where that is asked for."""
    trainer = quiet(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        accumulate_grad_batches=3,
        log_every_n_steps=100,
        callbacks=[] if save is None else [SaveAt(save[1], save[0])],
    )
    ranks = devices if isinstance(strategy, str) else 1
    data = torch.arange(4 * BATCHES, dtype=torch.float64).flip(0)
    loader = DataLoader(data, 4 // ranks)  # type: ignore[arg-type]
    trainer.fit(Numbers(skips), loader, ckpt_path=load)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def ahead(save: tuple[Path, int] | None = None, load: Path | None = None) -> dict[str, float]:
    return fit(lockstep.strategies.BalancedStrategy(one_process=True, split="equal"), 2, save=save, load=load)


def in_ddp(save: tuple[Path, int] | None = None, load: Path | None = None) -> dict[str, float]:
    return fit("ddp", torch.distributed.get_world_size(), save=save, load=load)


@pytest.mark.parametrize("batch", [BATCHES - 1, BATCHES - 2])
@pytest.mark.parametrize("skips", [False, True])
def test_a_step_s_newest_values_go_on(tmp_path: Path, batch: int, skips: bool) -> None:
    path = tmp_path / "saved.ckpt"
    whole = fit("auto", 1, skips, save=(path, batch))
    assert whole["step"] == (5.5 if skips else 1.5)  # the mean of the last batch, or of the fifth
    assert (whole["both_step"], whole["largest_step"]) == (1.5, 3.0)
    assert fit("auto", 1, skips, load=path) == whole


@pytest.mark.extension("balancing")
@pytest.mark.parametrize("batch", range(3, BATCHES))
def test_windows_that_are_played_ahead_save_what_their_last_micro_batch_logged(
    ranks: RankPool, tmp_path: Path, batch: int
) -> None:
    path = tmp_path / "saved.ckpt"
    (whole,) = ranks.run(ahead, (path, batch), world=1, group=False)
    assert (whole["step"], whole["largest_step"]) == (1.5, 3.0)
    assert ranks.run(ahead, None, path, world=1, group=False) == [whole]
    assert fit("auto", 1, load=path) == whole


@pytest.mark.parametrize(("before", "behind"), [(2, 2), (2, 1), (1, 2)])
def test_ranks_put_together_what_others_had_logged_last(
    ranks: RankPool, tmp_path: Path, before: int, behind: int
) -> None:
    path = tmp_path / "saved.ckpt"
    whole = ranks.run(in_ddp, (path, BATCHES - 1), world=before)[0]
    assert (whole["step"], whole["both_step"], whole["largest_step"]) == (1.5, 1.5, 3.0)
    assert ranks.run(in_ddp, None, path, world=behind) == [whole] * behind


def test_of_two_ranks_the_newer_value_counts() -> None:
    def saved(age: int | None, last: float, weight: float, reduce_fx: str) -> list[dict[str, Any]]:
        options = [False, None, True, True, reduce_fx, True, False, False]
        entry = {"key": ["training_step", -1, "a"], "options": options, "total": 0.0, "weight": 1.0, "fresh": True}
        return [{**entry, "last": last, "last_weight": weight, "age": age}]

    def newest(*parts: list[dict[str, Any]]) -> tuple[float, float, int | None]:
        (entry,) = merged(list(parts))
        return entry["last"], entry["last_weight"], entry["age"]

    assert newest(saved(2, 7.0, 1.0, "mean"), saved(0, 5.0, 3.0, "mean")) == (5.0, 3.0, 0)
    assert newest(saved(None, 7.0, 1.0, "mean"), saved(4, 5.0, 3.0, "mean")) == (5.0, 3.0, 4)
    assert newest(saved(1, 8.0, 1.0, "mean"), saved(1, 4.0, 3.0, "mean")) == (5.0, 4.0, 1)
    assert newest(saved(1, 8.0, 1.0, "max"), saved(1, 4.0, 3.0, "max")) == (8.0, 4.0, 1)
    assert newest(saved(None, 8.0, 1.0, "sum"), saved(None, 4.0, 3.0, "sum"))[2] is None


class Fails(Numbers):
    """Logs behind each batch, too, and fails in the third."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise RuntimeError("third batch")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.log("behind", float(batch_idx))


def test_what_was_logged_before_a_failure_can_be_read_behind_it() -> None:
    trainer = quiet(max_epochs=1)
    with pytest.raises(RuntimeError, match="third batch"):
        trainer.fit(Fails(skips=False), DataLoader(torch.arange(12.0).double(), batch_size=2))
    shown = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert shown == {
        "step": 2.5,
        "behind": 1.0,
        "both_step": 2.5,
        "both": 2.5,
        "largest_step": 3.0,
        "largest": 3.0,
    }
    assert {name: float(value) for name, value in trainer.logged_metrics.items()} == {
        "step": 2.5,
        "behind": 1.0,
        "both_step": 2.5,
        "largest_step": 3.0,
    }


def test_a_failure_is_raised_whatever_its_metrics_do(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet(max_epochs=1)

    def broken(*args: Any) -> None:
        raise RuntimeError("no values")

    monkeypatch.setattr(type(trainer.session), "show_logged", broken)
    with pytest.raises(RuntimeError, match="third batch"):
        trainer.fit(Fails(skips=False), DataLoader(torch.arange(12.0).double(), batch_size=2))
