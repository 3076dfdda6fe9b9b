"""What decides by logged values decides alike on all ranks: saving, stopping, learning rates, users' callbacks."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Callback
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from tests.loop.pieces import Recorder, Slope, Validated, acting, numbers, on_ranks
from tests.tools.pool import RankPool

VALUES = {0: [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 1: [1.0, 3.0, 2.0, 8.0, 7.0, 9.0]}
MEANS = [3.5, 4.0, 3.0, 5.5, 4.5, 5.0]  # rank 0 alone would keep the last ones, rank 1 the first


class Parts(Validated):
    """Logs another value on each rank in each step; where ``only`` is given, on that rank alone."""

    def __init__(self, only: int | None = None, **options: Any) -> None:
        super().__init__()
        self.only, self.options = only, options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.only in (None, self.global_rank):
            self.log("loss", VALUES[self.global_rank][batch_idx], **self.options)
        return super().training_step(batch, batch_idx)


# -- ModelCheckpoint ---------------------------------------------------------------------------------------


def keep(folder: Path, only: int | None, **settings: Any) -> tuple[list[tuple[str, float]], str, list[Any]]:
    callback = ModelCheckpoint(
        folder, "{step}-{loss:.2f}", monitor="loss", **{"every_n_train_steps": 1, "save_top_k": 2, **settings}
    )
    recorder = Recorder()
    on_ranks(max_epochs=1, enable_checkpointing=True, callbacks=[callback], logger=recorder, log_every_n_steps=1).fit(
        Parts(only), numbers(12)
    )
    kept = sorted((Path(path).name, float(score)) for path, score in callback.best_k_models.items())
    return kept, Path(callback.best_model_path).name, [metrics["loss"] for _, metrics in recorder.sent]


@pytest.mark.parametrize(("only", "values"), [(None, MEANS), (0, VALUES[0]), (1, VALUES[1])])
def test_checkpoints_are_ranked_by_the_value_of_all_ranks_and_not_by_each_rank_s_own(
    ranks: RankPool, tmp_path: Path, only: int | None, values: list[float]
) -> None:
    """By their own values one rank saved where the other did not, and waited for it without end."""
    first, second = ranks(2).run(keep, tmp_path, only, timeout=40)
    assert first == second
    best = sorted(values)[:2]
    expected = sorted((f"step={values.index(value) + 1}-loss={value:.2f}.ckpt", value) for value in best)
    assert first[0] == expected
    assert {path.name for path in tmp_path.iterdir()} == {name for name, _ in expected}
    assert first[1] == f"step={values.index(best[0]) + 1}-loss={best[0]:.2f}.ckpt"
    assert first[2] == values  # a decision takes nothing away from the loggers


def keep_by_time(folder: Path) -> tuple[list[tuple[str, float]], str, list[Any]]:
    clock = time.monotonic
    hours = torch.distributed.get_rank()  # rank 0's clock stands still
    time.monotonic = lambda: clock() + 3600 * hours * Parts.count  # type: ignore[method-assign, attr-defined]

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            Parts.count = batch_idx  # type: ignore[attr-defined]

    Parts.count = 0  # type: ignore[attr-defined]
    callback = ModelCheckpoint(
        folder, "{step}", monitor="loss", train_time_interval=timedelta(hours=0.9), save_top_k=-1
    )
    try:
        trainer = on_ranks(max_epochs=1, enable_checkpointing=True, callbacks=[Counts(), callback])
        trainer.fit(Parts(), numbers(12))
    finally:
        time.monotonic = clock  # type: ignore[method-assign]
        del Parts.count  # type: ignore[attr-defined]
    kept = sorted((Path(path).name, float(score)) for path, score in callback.best_k_models.items())
    return kept, Path(callback.best_model_path).name, []


def test_one_rank_s_clock_saves_on_all_ranks_and_by_the_value_of_all(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(keep_by_time, tmp_path, timeout=40)
    assert first == second
    assert len(first[0]) > 1
    assert all(value == MEANS[int(name[5]) - 1] for name, value in first[0])
    assert {path.name for path in tmp_path.iterdir()} == {name for name, _ in first[0]}


def keep_by_hand(folder: Path) -> list[float]:
    class Writes(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero:
                trainer.callback_metrics["mine"] = torch.tensor(float(batch_idx))

    callback = ModelCheckpoint(folder, "{step}", monitor="mine", every_n_train_steps=2, save_top_k=-1)
    on_ranks(max_epochs=1, enable_checkpointing=True, callbacks=[Writes(), callback]).fit(Slope(), numbers(12))
    return sorted(float(score) for score in callback.best_k_models.values())


def test_a_value_that_a_callback_wrote_on_rank_zero_alone_ranks_on_all(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(keep_by_hand, tmp_path, timeout=40) == [[1.0, 3.0, 5.0]] * 2


# -- EarlyStopping, ReduceLROnPlateau ----------------------------------------------------------------------


def stop_early(only: int | None) -> tuple[int, float, str]:
    stopper = EarlyStopping("loss", patience=99, stopping_threshold=3.2, check_on_train_epoch_end=False)
    trainer = on_ranks(max_epochs=1, callbacks=[stopper], val_check_interval=1, num_sanity_val_steps=0)
    module = Parts(only)
    result = trainer.fit(module, numbers(12), numbers(2))
    return len(module.batches), float(stopper.best_score), result.stopped


def test_early_stopping_judges_a_value_of_a_step_by_all_ranks(ranks: RankPool) -> None:
    """Rank 0's own value decided for all."""
    steps = MEANS.index(3.0) + 1
    for ran, best, stopped in ranks(2).run(stop_early, None, timeout=40):
        assert (ran, best) == (steps, 3.5)
        assert stopped == "EarlyStopping: loss = 3 has passed the stopping threshold 3.2"


@pytest.mark.parametrize("only", [0, 1])
def test_early_stopping_by_a_value_that_one_rank_logs(ranks: RankPool, only: int) -> None:
    steps = next(i for i, value in enumerate(VALUES[only]) if value < 3.2) + 1
    found = ranks(2).run(stop_early, only, timeout=40)
    assert [ran for ran, _, _ in found] == [steps] * 2


def plateau(only: int | None) -> list[float]:
    class Watched(Parts):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=64.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "monitor": "loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    rates: list[float] = []
    on_ranks(max_epochs=1).fit(Watched(only), numbers(12))
    return rates


@pytest.mark.parametrize(("only", "values"), [(None, MEANS), (1, VALUES[1])])
def test_a_plateau_by_steps_reads_what_any_rank_logged(ranks: RankPool, only: int | None, values: list[float]) -> None:
    """A rank that had not logged the name refused the fit, and the other waited for it."""
    rate, expected = 64.0, [64.0]
    for i in range(1, 6):
        if i > 1 and values[i - 1] >= min(values[: i - 1]):
            rate /= 2
        expected.append(rate)
    assert ranks(2).run(plateau, only, timeout=40) == [expected] * 2


# -- sync_dist ---------------------------------------------------------------------------------------------


class Stops(Callback):
    """Stops where the value in ``callback_metrics`` is over a bound; notes what it saw."""

    def __init__(self, bound: float, name: str = "loss") -> None:
        self.bound, self.name = bound, name
        self.seen: list[float | None] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = trainer.callback_metrics.get(self.name)
        self.seen.append(None if value is None else float(value))
        if value is not None and value > self.bound:
            trainer.should_stop = True


def stop_by(bound: float, only: int | None = None, **options: Any) -> tuple[list[float | None], int, list[int]]:
    stops, module = Stops(bound), Parts(only, sync_dist=True, **options)
    trainer = on_ranks(max_epochs=1, callbacks=[stops], num_sanity_val_steps=0)
    trainer.fit(module, numbers(12), numbers(2))
    return stops.seen, trainer.global_step, module.validated


def test_sync_dist_reduces_the_value_that_a_callback_reads_in_the_step(ranks: RankPool) -> None:
    """Each rank saw its own value until the next logging interval, and stopped by that."""
    seen = MEANS[: MEANS.index(5.5) + 1]
    assert ranks(2).run(stop_by, 5.2) == [(seen, len(seen), [len(seen)])] * 2


@pytest.mark.parametrize("only", [0, 1])
def test_sync_dist_on_one_rank_hangs_nobody(ranks: RankPool, only: int) -> None:
    assert ranks(2).run(stop_by, 99.0, only, timeout=40) == [(VALUES[only], 6, [6])] * 2


def stepped(module: Any, *_: Any) -> None:
    module.optimizers().step()


def read_in_each_step(way: str) -> list[float | None]:
    stops, module = Stops(99.0), Parts(sync_dist=True)
    if way == "by hand":
        module = acting(Parts, on_train_batch_start=stepped)
        module.options, module.automatic_optimization = {"sync_dist": True}, False
    accumulate = 3 if way == "in windows" else 1
    on_ranks(max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[stops]).fit(module, numbers(12))
    return stops.seen


@pytest.mark.parametrize("way", ["in windows", "by hand"])
def test_sync_dist_holds_for_every_micro_batch(ranks: RankPool, way: str) -> None:
    assert ranks(2).run(read_in_each_step, way) == [MEANS] * 2


def resume(folder: Path) -> tuple[list[float | None], list[float | None]]:
    """Values are logged with sync_dist in even steps only; the second half begins with an odd one."""

    def log(module: Any, batch: Any, at: int) -> None:
        if at % 2 == 0:
            module.log("loss", VALUES[module.global_rank][at], sync_dist=True)

    path = folder / "half.ckpt"
    first = Stops(99.0)
    trainer = on_ranks(max_steps=3, callbacks=[first])
    trainer.fit(acting(training_step=log), numbers(12))
    trainer.save_checkpoint(path)
    second = Stops(99.0)
    on_ranks(max_steps=6, callbacks=[second]).fit(acting(training_step=log), numbers(12), ckpt_path=path)
    return first.seen, second.seen


def test_a_resumed_fit_goes_on_reducing_every_step(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(resume, tmp_path, timeout=40)
    assert first == second
    assert first[0] + first[1] == [MEANS[0], MEANS[0], MEANS[2], MEANS[2], MEANS[4], MEANS[4]]


# -- callbacks that one rank has and others have not --------------------------------------------------------


class Reads(Callback):
    """As mlflow's, which is put into the Trainer of the rank that has a run: it reads, and dumps a checkpoint."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        saved = trainer._checkpoint_connector.dump_checkpoint(False)
        self.seen.append((float(trainer.callback_metrics["loss"]), saved["global_step"]))


def read_on_rank_zero(folder: Path) -> list[tuple[float, int]]:
    reads = Reads()
    trainer = on_ranks(max_epochs=2, enable_checkpointing=True, default_root_dir=folder)
    if trainer.is_global_zero:
        trainer.callbacks += [reads]
    trainer.fit(Parts(on_epoch=True), numbers(12))
    return reads.seen


def test_a_callback_may_be_on_one_rank_alone(ranks: RankPool, tmp_path: Path) -> None:
    """A hook at the epoch's end had that rank reduce once more than the others, which waited for something else."""
    first, second = ranks(2).run(read_on_rank_zero, tmp_path, timeout=40)
    assert second == []
    assert [step for _, step in first] == [6, 12]
