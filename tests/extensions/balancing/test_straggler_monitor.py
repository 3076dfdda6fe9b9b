"""StragglerMonitor: which rank it names, and for which part of its steps; by clocks that stand still otherwise."""

from __future__ import annotations

import socket
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.callbacks import StragglerMonitor
from tests.extensions.balancing.balanced import Clock, made_up_clock
from tests.loop.pieces import Recorder, Slope, on_ranks
from tests.tools.pool import RankPool

PARTS = ("data", "forward", "backward", "other")


class Numbers(Dataset[Tensor]):
    """Samples that take a while."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Tensor:
        self.clock.now += self.seconds
        return torch.tensor(float(index + 1), dtype=torch.float64)


class Slow(Slope):
    """Each part takes a millisecond a sample, and one of them ``factor`` on one rank between two steps."""

    def __init__(self, clock: Clock, part: str, factor: float, steps: range) -> None:
        super().__init__()
        self.clock, self.part, self.factor, self.steps = clock, part, factor, steps

    def takes(self, part: str, samples: int) -> None:
        trainer = self.trainer
        slow = part == self.part and trainer.global_rank == trainer.world_size - 1 and trainer.global_step in self.steps
        self.clock.now += samples * (self.factor if slow else 1.0) / 1000

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.takes("other", len(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.takes("forward", len(batch))
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: self.takes("backward", len(batch)))
        return loss


def run(part: str, factor: float, steps: range, start: Any, patience: int = 3) -> dict[str, Any]:
    with made_up_clock() as clock, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitor, logger = StragglerMonitor(patience=patience), Recorder()
        trainer = start(max_epochs=4, callbacks=[monitor], logger=logger, log_every_n_steps=1)
        slow_data = part == "data" and trainer.global_rank == trainer.world_size - 1
        data = Numbers(clock, (factor if slow_data else 1.0) / 1000)
        trainer.fit(Slow(clock, part, factor, steps), DataLoader(data, 4))
    named = [str(each.message) for each in told if "StragglerMonitor" in str(each.message)]
    logged = [sent for _, sent in logger.sent if "straggler/rank" in sent]
    return {"scores": monitor.scores, "named": named, "kept": monitor.named, "logged": logged}


@pytest.mark.everyday(2)
@pytest.mark.parametrize("part", PARTS)
def test_a_slow_rank_is_named_with_the_part_of_its_step(ranks: RankPool, part: str) -> None:
    first, second = ranks(2).run(run, part, 5.0, range(1000), on_ranks)
    assert second["named"] == []  # rank 0 tells it
    (told,) = first["named"]
    assert f"rank 1 on {socket.gethostname()} takes 2.00 x the fastest rank's time" in told
    assert f"most of it in {part} (ms of a step of 4 samples" in told
    for found in (first, second):
        assert [(each.rank, each.score, each.part) for each in found["scores"]][1] == (1, pytest.approx(2.0), part)
        assert found["scores"][0].score == 1.0
        assert len(found["kept"]) == 1
    assert first["logged"][-1]["straggler/rank"] == 1
    assert first["logged"][-1]["straggler/score"] == pytest.approx(2.0)
    assert second["logged"] == []


def test_a_rank_that_was_slow_for_a_while_is_named_with_its_past_and_again_when_it_is_back(ranks: RankPool) -> None:
    found = ranks(2).run(run, "forward", 9.0, range(24, 48), on_ranks, 2)[0]
    (told,) = found["named"]
    assert "takes 3.00 x the fastest rank's time for a sample, and 3.00 x its own best" in told
    assert [each.score for each in found["scores"]] == [1.0, 1.0]
