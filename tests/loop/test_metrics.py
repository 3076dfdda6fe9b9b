"""torchmetrics objects over loaders and ranks: each loader its own number, and ranks that collected nothing."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import AUROC, CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MetricTracker, SumMetric

import lockstep
from lockstep import Callback, LightningModule
from lockstep.ground import comm
from lockstep.loop.logged_entry import Entry, merged
from lockstep.loop.logged_rows import Rows, extreme, shown_value
from lockstep.loop.logging import LogCollector
from tests.loop.pieces import SaveAt, Slope, Validated, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Kept(Metric):
    """A list that is not joined to one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", default=[], dist_reduce_fx=None)
        self.kept: list[Tensor]

    def update(self, value: Tensor) -> None:
        self.kept.append(value)

    def compute(self) -> Tensor:
        return torch.stack(self.kept).sum()


def judged(samples: int) -> dict[str, float]:
    def judge(module: Any, batch: Tensor, at: int) -> None:
        kept.update(batch.sum())
        module.log("judged", kept)

    kept = Kept()
    return on_ranks().validate(acting(Validated, validation_step=judge), numbers(samples), verbose=False)[0]


class Beside(Callback):
    def __init__(self) -> None:
        self.parts = MetricCollection({"cat": CatMetric(), "sum": SumMetric()})
        self.found: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.parts.update(batch.long())  # no float, which an empty list is taken for

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        parts = self.parts.compute()
        self.found.append((sorted(parts["cat"].tolist()), parts["sum"].item()))
        self.parts.reset()


def computed(samples: int) -> tuple[dict[str, float], list[Any]]:
    plain, beside, auroc = Metric._sync_dist, Beside(), AUROC(task="binary")
    module = acting(
        Validated,
        validation_step=lambda m, batch, at: auroc.update(batch / 10, (batch > 1).long()),
        on_validation_epoch_end=lambda m: m.log("auroc", auroc.compute()),
    )
    found = on_ranks(callbacks=beside).validate(module, numbers(samples), verbose=False)[0]
    assert Metric._sync_dist is plain
    return found, beside.found


def test_a_metric_that_the_user_computes_on_a_rank_without_samples_ended_in_an_abort(ranks: RankPool) -> None:
    """`compute()` in a hook of the module's or of a callback's: gloo aborted ranks whose lists had other types."""
    for found in ranks(3).run(computed, 2, timeout=40):
        assert found == ({"auroc": 1.0}, [([1, 2], 3.0)])


def test_lists_of_other_lengths_that_are_not_joined_are_refused(ranks: RankPool) -> None:
    with pytest.raises(Exception, match=r"Kept has a list state 'kept'[\s\S]*\[2, 1\] entries on the ranks"):
        ranks(2).run(judged, 3, timeout=40)
    assert ranks(2).run(judged, 4, timeout=40) == [{"judged": 10.0}] * 2


class Several(Slope):
    """One metric object for all loaders; and a collection whose members share their states."""

    def __init__(self, together: bool = False) -> None:
        super().__init__()
        self.mean, self.together = MeanMetric(), together
        self.parts = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="part_")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(batch)
        self.parts.update(batch)
        if self.together:
            self.log("mean", self.mean, add_dataloader_idx=False)
        else:
            self.log("mean", self.mean)
            self.log_dict(self.parts)


LOADERS = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0], [7.0]]


def several(together: bool, world: int) -> list[dict[str, float]]:
    loaders = [DataLoader(torch.tensor(values, dtype=torch.float64), batch_size=1) for values in LOADERS]  # type: ignore[arg-type]
    trainer = quiet() if world == 1 else on_ranks()
    module = Several(together)
    first = trainer.validate(module, loaders, verbose=False)
    assert trainer.validate(module, loaders, verbose=False) == first
    return first


@pytest.mark.parametrize("world", [1, 3])
def test_one_metric_logged_from_several_loaders_showed_the_mixture_for_each(ranks: RankPool, world: int) -> None:
    for found in [several(False, 1)] if world == 1 else ranks(world).run(several, False, world, timeout=40):
        for number, (values, metrics) in enumerate(zip(LOADERS, found, strict=True)):
            mean, name = sum(values) / len(values), f"dataloader_idx_{number}"
            expected = {"mean": mean, "part_mean": mean, "part_sum": sum(values)}
            assert metrics == {f"{key}/{name}": pytest.approx(value) for key, value in expected.items()}
    every = [value for values in LOADERS for value in values]
    for found in [several(True, 1)] if world == 1 else ranks(world).run(several, True, world, timeout=40):
        assert [metrics["mean"] for metrics in found] == [pytest.approx(sum(every) / len(every))] * 3


# -- not a number is the extreme of all


INF, NAN = math.inf, math.nan
EXTREMES = [
    ("max", [1.0, NAN, 3.0], NAN),
    ("max", [NAN, 1.0], NAN),
    ("min", [1.0, NAN], NAN),
    ("min", [NAN, -INF], NAN),
    ("max", [1.0, INF], INF),
    ("max", [-INF, -INF], -INF),
    ("min", [INF, INF], INF),
    ("min", [0.0, -0.0], -0.0),
    ("max", [-0.0, 0.0], 0.0),
    ("max", [-0.0, -0.0], -0.0),
]


def alike(one: float, other: float) -> bool:
    return (one != one and other != other) or (one == other and math.copysign(1, one) == math.copysign(1, other))


PARTS = [*itertools.product([0.1, -0.0, 0.0, NAN, INF, -INF, 1e16, 1 / 3], [0.0, 1.0, 3.0], [4.0, 5.0])]


def as_before(op: str, parts: list[Any]) -> float:
    """A plain reduction of the ranks' parts, in their order."""
    newest = max((micro_batch for _, weight, micro_batch in parts if weight), default=0)
    parts = [part for part in parts if part[1] and part[2] == newest]
    values = [value for value, _, _ in parts]
    total = functools.reduce(operator.add, values, 0.0)
    if op == "mean":
        weight = functools.reduce(operator.add, [weight for _, weight, _ in parts], 0.0)
        return total / weight if weight else NAN
    if op == "sum":
        return total
    return functools.reduce(functools.partial(extreme, op), values, INF if op == "min" else -INF)


@pytest.mark.parametrize("world", [1, 2, 5, 8, 20])
def test_rows_of_ranks_are_combined_as_their_values_are_one_by_one(world: int) -> None:
    drawn = random.Random(world)
    ops = [("mean", "sum", "min", "max")[number % 4] for number in range(400)]
    parts = [[drawn.choice(PARTS) for _ in ops] for _ in range(world)]
    rows = Rows(ops, 400, True)
    every = torch.stack([rows.make(7, rank == 1, parts[rank]) for rank in range(world)])
    combined = comm._by_tree(every, rows.combine)
    assert not rows.ranks_differ(combined)
    for place, (op, total) in enumerate(zip(ops, rows.totals(combined), strict=True)):
        found = shown_value(op, *total)
        of_ranks = [parts[rank][place] for rank in range(world)]
        expected = as_before(op, of_ranks)
        if world <= 8 or op in ("min", "max"):
            assert alike(found, expected), (op, of_ranks)
        else:  # sums by eights have other bits
            assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def extremes(on_tensors: bool, world: int) -> list[dict[str, float]]:
    found = []
    for _, values, _ in EXTREMES:
        trainer = quiet(max_epochs=1) if world == 1 else on_ranks(max_epochs=1)
        logged = [torch.tensor(value, dtype=torch.float64) if on_tensors else value for value in values]

        def log(module: Any, batch: Any, at: int, logged: list[Any] = logged) -> None:
            for op in ("min", "max"):
                module.log(op, logged[int(batch.item()) - 1], on_epoch=True, reduce_fx=op, sync_dist=True)

        trainer.fit(acting(training_step=log), numbers(len(values)))
        found.append({name: value.item() for name, value in trainer.callback_metrics.items()})
    return found


@pytest.mark.everyday
@pytest.mark.parametrize("on_tensors", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_nan_disappeared_from_extremes(ranks: RankPool, world: int, on_tensors: bool) -> None:
    every = [extremes(on_tensors, 1)] if world == 1 else ranks(world).run(extremes, on_tensors, world, timeout=60)
    for metrics in every:
        for (op, values, expected), found in zip(EXTREMES, metrics, strict=True):
            assert alike(found[f"{op}_epoch"], expected), (op, values, found)
            if world == len(values):  # the values of one step, over the ranks
                assert alike(found[f"{op}_step"], expected), (op, values, found)


@pytest.mark.parametrize(("op", "values", "expected"), EXTREMES)
def test_a_resume_keeps_the_extreme(op: str, values: list[float], expected: float) -> None:
    def collected(some: list[float]) -> LogCollector:
        results = LogCollector(lambda row, combine: row, lambda item, make: make([item]))
        results.enter("training_step")
        for value in some:
            results.log("x", value, (False, None, False, True, op, True, False, False), None)
        return results

    half = len(values) // 2
    states = [collected(values[:half]).state_dict(), collected(values[half:]).state_dict()]
    joined = collected([])
    joined.load_state_dict(merged(states))
    resumed = collected([])
    resumed.load_state_dict(states[0])
    resumed.enter("training_step")
    for value in values[half:]:
        resumed.log("x", value, (False, None, False, True, op, True, False, False), None)
    for results in (joined, resumed):
        [(entry, _, value)] = results.reduce_epoch()
        assert isinstance(entry, Entry)
        assert alike(value.item(), expected)


class Best(Slope):
    """As the hydra template has it: what was logged is computed at the epoch's end, for the best value so far."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.judged, self.best = SumMetric(), SumMetric(), MaxMetric()
        self.found: list[tuple[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen(batch)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.judged(batch)
        self.log("judged", self.judged, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.best(self.judged.compute())
        self.log("best", self.best.compute())

    def on_validation_end(self) -> None:
        self.found.append(("at the end", self.judged.compute().item()))

    def on_train_epoch_end(self) -> None:
        self.found.append(("in training", self.seen.compute().item()))


def best(several: bool) -> list[Any]:
    module, trainer = Best(), on_ranks(max_epochs=2, num_sanity_val_steps=1)
    loaders = [numbers(3), numbers(2)] if several else numbers(3)
    trainer.fit(module, numbers(5, 2), loaders)
    shown = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return [module.found, shown]


@pytest.mark.everyday
@pytest.mark.parametrize("several", [False, True])
def test_a_metric_that_was_logged_was_empty_in_the_hook_of_the_epochs_end(ranks: RankPool, several: bool) -> None:
    total = 9.0 if several else 6.0
    logged = {"judged/dataloader_idx_0": 6.0, "judged/dataloader_idx_1": 3.0} if several else {"judged": 6.0}
    for found, shown in ranks(2).run(best, several, timeout=60):
        assert shown == {"seen": 15.0, "best": total, **logged}
        assert found[1:] == [("at the end", total), ("in training", 15.0)] * 2


def test_a_metric_of_single_steps_begins_anew_with_each_epoch() -> None:
    """Its lists grew for the whole fit."""

    seen, judged, found = CatMetric(), CatMetric(), []

    def log(module: Slope, name: str, metric: Metric, batch: Tensor) -> None:
        metric(batch)
        module.log(name, metric, on_step=True, on_epoch=False)

    module = acting(
        Validated,
        training_step=lambda m, batch, at: log(m, "seen", seen, batch),
        validation_step=lambda m, batch, at: log(m, "judged", judged, batch),
        on_validation_epoch_end=lambda m: found.append(judged._update_count),
        on_train_epoch_end=lambda m: found.append(seen._update_count),
    )
    quiet(max_epochs=2).fit(module, numbers(4), numbers(3))
    assert found == [2, 3, 4, 3, 4]


class Tracks(Slope):
    """A metric for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(SumMetric(), maximize=True)
        self.found: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tracker.update(batch + self.current_epoch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.found.append(self.tracker.compute_all().tolist())


@pytest.mark.parametrize("at", [1, 2])
def test_a_tracker_of_metrics_made_its_checkpoint_malformed(at: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.ckpt"

    whole, rest = Tracks(), Tracks()
    quiet(max_epochs=3, callbacks=[SaveAt(at, path, epoch=1)]).fit(whole, numbers(3))
    quiet(max_epochs=3).fit(rest, numbers(3), ckpt_path=path)
    assert whole.found == [[6], [6, 9], [6, 9, 12]]
    assert rest.found == whole.found[1:]


def test_a_metric_that_the_module_does_not_show_is_told_to_be_missing_in_a_checkpoint(tmp_path: Path) -> None:
    kept = [SumMetric()]

    def step(module: Slope, batch: Tensor, at: int) -> None:
        kept[0].to(batch.device)(batch)
        module.log("kept", kept[0], on_step=False, on_epoch=True)

    with pytest.warns(UserWarning, match=r"self\.log\('kept', <SumMetric>\): the metric is not an attribute of the"):
        quiet(max_epochs=1, callbacks=[SaveAt(1, tmp_path / "cut.ckpt")]).fit(acting(training_step=step), numbers(3))


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_a_fit_behind_an_evaluation_found_metrics_of_inference_mode(call: str) -> None:
    class Sums(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.logged, self.own = SumMetric(), SumMetric()
            self.register_buffer("seen", torch.zeros(()))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.logged(batch)
            self.own.update(batch)
            self.seen = self.seen + 1
            if not self.trainer.predicting:
                self.log("sum", self.logged)

        test_step = predict_step = validation_step

        def on_validation_epoch_end(self) -> None:
            self.own.reset()

        on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

        def on_train_epoch_end(self) -> None:
            self.seen += 1

    module, trainer = Sums(), quiet(max_epochs=1, num_sanity_val_steps=0)
    getattr(trainer, call)(module, numbers(3))
    module.logged.reset()
    trainer.fit(module, numbers(3), numbers(3))
    assert (trainer.callback_metrics["sum"], module.seen) == (6, 7)


# -- What a step has logged last is in a checkpoint that is saved at the end of its batch, though no logger has it


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
    of_steps = {"step": 2.5, "behind": 1.0, "both_step": 2.5, "largest_step": 3.0}
    assert shown == {**of_steps, "both": 2.5, "largest": 3.0}
    assert {name: float(value) for name, value in trainer.logged_metrics.items()} == of_steps
