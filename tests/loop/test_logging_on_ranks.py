"""`self.log` on several ranks: what each logged is one number for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loop.pieces import Recorder, Slope, numbers, on_ranks
from tests.tools.pool import RankPool


class Sevens(Slope):
    """Validates 7 samples, whose mean no mean of the ranks' means gives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = batch**2
        for name in ("mean", "sum", "min", "max"):
            self.log(name, getattr(values, name)(), reduce_fx=name)
        self.log("rank zero's", float(self.global_rank + 5), rank_zero_only=True)

    def on_validation_epoch_end(self) -> None:
        self.log("ranks", float(self.global_rank))


def validate(samples: int, batch_size: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    trainer = on_ranks()
    returned = trainer.validate(Sevens(), numbers(samples, batch_size), verbose=False)
    return returned, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("world", "samples", "batch_size"), [(2, 7, 1), (2, 7, 2), (3, 7, 4), (2, 1, 1)])
def test_a_validation_gives_the_true_numbers_on_every_rank(
    ranks: RankPool, world: int, samples: int, batch_size: int
) -> None:
    """7 samples on 2 ranks: Lightning 2.6.6 says 14.375 for 16.43 or the like."""
    squares = [number**2 for number in range(1, samples + 1)]
    expected = {
        "mean": sum(squares) / samples,
        "sum": sum(squares),
        "min": 1,
        "max": samples**2,
        "rank zero's": 5.0,
        "ranks": (world - 1) / 2,
    }
    for returned, shown in ranks(world).run(validate, samples, batch_size):
        assert returned == [pytest.approx(expected)]
        assert shown == pytest.approx(expected)


def test_a_rank_without_samples_shows_what_the_others_logged_in_their_type(ranks: RankPool) -> None:
    """It had logged nothing, and showed the value in float32: a threshold could be crossed on some ranks only."""
    shown = [shown for _, shown in ranks(3).run(validate_thirds)]
    assert shown[0] == shown[1] == shown[2] == {"third": 1 / 3}


class Thirds(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("third", batch.mean() / 3)


def validate_thirds() -> tuple[Any, dict[str, float]]:
    trainer = on_ranks()
    returned = trainer.validate(Thirds(), numbers(1), verbose=False)
    return returned, {name: value.item() for name, value in trainer.callback_metrics.items()}


class Measured(Slope):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MaxMetric, MeanMetric, MetricCollection

        self.mean = MeanMetric()
        self.pair = MetricCollection({"mean": MeanMetric(), "max": MaxMetric()}, prefix="pair/")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch)
        self.pair.update(batch)
        self.log("mean", self.mean)
        self.log_dict(self.pair)


def measure(samples: int) -> list[dict[str, float]]:
    trainer: Any = on_ranks()
    found: list[dict[str, float]] = trainer.validate(Measured(), numbers(samples), verbose=False)
    return found


@pytest.mark.parametrize("samples", [7, 1])
def test_torchmetrics_see_the_samples_of_all_ranks(ranks: RankPool, samples: int) -> None:
    """A rank without a sample never reached `self.log`, and that was an error."""
    mean = (samples + 1) / 2
    expected = {"mean": mean, "pair/mean": mean, "pair/max": float(samples)}
    assert ranks(2).run(measure, samples) == [[expected]] * 2


class Different(Slope):
    """Each rank logs a name of its own besides a common one, and more names than fit at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(f"of rank {self.global_rank}", batch.mean(), on_epoch=True)
        for number in range(40):
            self.log(f"n{number}", float(number), on_epoch=True, on_step=False)
            self.log(f"m{number}", batch.mean(), on_epoch=True, on_step=True)
        return super().training_step(batch, batch_idx)


def differ() -> tuple[dict[str, float], list[Any]]:
    recorder = Recorder()
    trainer = on_ranks(max_epochs=2, logger=recorder, log_every_n_steps=1)
    trainer.fit(Different(), numbers(4))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, recorder.sent


def test_ranks_that_log_different_names_do_not_wait_for_each_other(ranks: RankPool) -> None:
    (first, sent), (second, others) = ranks(2).run(differ, timeout=30)
    assert first == second
    assert (first["of rank 0_epoch"], first["of rank 1_epoch"]) == (2.0, 3.0)
    assert (first["n39"], first["m39_epoch"], first["m39_step"]) == (39.0, 2.5, 3.5)
    assert [step for step, _ in sent] == [0, 1, 1, 2, 3, 3]
    assert sent[0][1]["m7_step"] == 1.5
    assert sent == others


def single_steps() -> dict[str, float]:
    class Steps(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("own", batch.mean())
            self.log("total", batch.mean(), reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    trainer = on_ranks(max_epochs=1)
    return trainer.fit(Steps(), numbers(4)).metrics


def test_the_last_steps_values_are_the_same_on_all_ranks_after_a_fit(ranks: RankPool) -> None:
    assert ranks(2).run(single_steps) == [{"own": 3.5, "total": 7.0}] * 2


def stop_on_one(rank: int) -> list[Any]:
    class Ends(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("own", batch.mean(), sync_dist=True)
            self.trainer.should_stop = (self.global_rank, batch_idx) == (rank, 1)
            return super().training_step(batch, batch_idx)

    recorder = Recorder()
    on_ranks(max_epochs=2, logger=recorder, log_every_n_steps=50).fit(Ends(), numbers(8))
    return recorder.sent


@pytest.mark.parametrize("rank", [0, 1])
def test_the_step_at_which_one_rank_stops_is_sent_with_the_values_of_all(ranks: RankPool, rank: int) -> None:
    first, _ = ranks(2).run(stop_on_one, rank, timeout=30)
    assert first == [(1, {"own": 3.5, "epoch": 0})]


def gather() -> Any:
    class Gathers(Slope):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.all_gather({"x": batch})["x"].flatten().tolist())

    seen: list[Any] = []
    on_ranks().validate(Gathers(), numbers(4), verbose=False)
    return seen


def test_all_gather_stacks_what_the_ranks_have(ranks: RankPool) -> None:
    assert ranks(2).run(gather) == [[[1.0, 2.0], [3.0, 4.0]]] * 2


def talk() -> Any:
    torch.manual_seed(0)
    trainer = on_ranks()
    trainer.validate(Sevens(), numbers(2), verbose=False)
    strategy = trainer.strategy
    strategy.barrier("here")
    return (
        trainer.is_global_zero,
        trainer.global_rank,
        trainer.world_size,
        strategy.broadcast({"from": trainer.global_rank}, src=1),
        strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum").item(),
        strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="max").item(),
    )


def test_ranks_know_where_they_are_and_can_talk(ranks: RankPool) -> None:
    assert ranks(2).run(talk) == [(rank == 0, rank, 2, {"from": 1}, 1.0, 1.0) for rank in range(2)]
