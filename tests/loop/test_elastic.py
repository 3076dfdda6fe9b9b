"""A run that goes on with another number of ranks ends where one that was never stopped ends, sample for sample."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningModule
from lockstep.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lockstep.loop.metrics import load_metric
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import Killed, quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


class Reads(LightningModule):
    """A small net in double precision, whose step notes the samples that count, by optimizer step."""

    frequency = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.seen: list[tuple[int, int, int]] = []
        self.validated: list[int] = []

    def loss(self, batch: Any) -> Any:
        x, index = batch
        if self.trainer.results.weight:
            step = self.trainer.global_step
            self.seen += [(self.current_epoch, step, sample) for sample in index.tolist()]
        return (self.net(x).squeeze(1) - x[:, 0]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)
        config = {"scheduler": schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}


class EveryOther(Reads):
    """Its schedule counts batches."""

    frequency = 2


class ByHand(Reads):
    """Steps its optimizer itself, at every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def rows(length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    x = torch.randn(length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, torch.arange(length)), batch_size, **{"shuffle": True, **options})


class Cut(Callback):
    """Saves after so many batches of a rank (all ranks, or one alone as after a failure), and ends the run there."""

    def __init__(self, batches: int, path: Path, alone: bool = False) -> None:
        self.left, self.path, self.alone = batches, path, alone

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            if not self.alone:
                trainer.save_checkpoint(self.path)
            elif trainer.is_global_zero:
                trainer.fit_loop.save_alone(self.path)
            raise Killed


class CutAfterStep(ModelCheckpoint):
    """Saves after every so many steps, and ends the run before the step that follows the first save.

    Where ranks have no samples of a batch, a callback of the user's cannot save after it.
    """

    def __init__(self, steps: int, path: Path) -> None:
        super().__init__(path.parent, path.stem, every_n_train_steps=steps)
        self.path = path

    def on_before_optimizer_step(self, *args: Any) -> None:
        if Path(self.best_model_path).name == self.path.name:  # not that of an earlier life
            raise Killed

    def on_train_end(self, *args: Any) -> None:
        raise Killed


def life(
    make: Any, flags: dict[str, Any], load: Path | None = None, cut: Cut | CutAfterStep | None = None
) -> dict[str, Any]:
    """One life of a run, on the ranks that there are."""
    flags = dict(flags)
    module = flags.pop("module", Reads)()
    if torch.distributed.is_initialized():
        flags = {"strategy": "ddp", "devices": torch.distributed.get_world_size(), **flags}
    trainer = quiet(**{**flags, "callbacks": [*flags.get("callbacks", ()), *([] if cut is None else [cut])]})
    trainer.seed = 7
    validation = DataLoader(torch.arange(4), batch_size=1)
    with nullcontext() if cut is None else pytest.raises(Killed):
        trainer.fit(module, make(), validation, ckpt_path=load)
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return {
        "seen": module.seen,
        "weights": weights,
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "validated": module.validated,
        "micro": trainer.accumulate_grad_batches,
    }


def play(ranks: RankPool, world: int, *args: Any) -> dict[str, Any]:
    """A life on so many ranks: rank 0's, with what all have seen."""
    found = [life(*args)] if world == 1 else ranks(world).run(life, *args, timeout=50)
    for each in found[1:]:
        assert torch.equal(each["weights"], found[0]["weights"])
    return {**found[0], "seen": [sample for each in found for sample in each["seen"]]}


class Rows:
    """Makes the loader in each rank."""

    def __init__(self, length: int, batch_size: int, **options: Any) -> None:
        self.given = {"length": length, "batch_size": batch_size, **options}

    def __call__(self) -> DataLoader[Any]:
        return rows(**self.given)


def until(step: int, found: dict[str, Any]) -> dict[str, Any]:
    """A life without what came after its last save."""
    return {**found, "seen": [sample for sample in found["seen"] if sample[1] < step]}


def by_step(seen: list[tuple[int, int, int]]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for epoch, step, sample in sorted(seen):
        found.setdefault((epoch, step), []).append(sample)
    return found


def compare(found: list[dict[str, Any]], expected: dict[str, Any], samples: int, tolerance: float = 1e-12) -> None:
    """The lives of a run together against one that nothing has disturbed."""
    last = found[-1]
    seen = [sample for life in found for sample in life["seen"]]
    assert by_step(seen) == by_step(expected["seen"])
    assert set(Counter((epoch, sample) for epoch, _, sample in seen).values()) == {1}
    assert len(seen) == 2 * samples
    torch.testing.assert_close(last["weights"], expected["weights"], rtol=0, atol=tolerance)
    assert (last["steps"], last["epochs"]) == (expected["steps"], expected["epochs"])
    assert last["lr"] == expected["lr"]


@pytest.mark.parametrize(
    ("before", "after", "accumulate", "samples", "batch_size"),
    [(2, 3, 2, 29, 1), (3, 2, 1, 59, 4), (1, 2, 4, 59, 4)],
)
def test_another_number_of_ranks_takes_the_same_steps(
    ranks: RankPool, before: int, after: int, accumulate: int, samples: int, batch_size: int, tmp_path: Path
) -> None:
    """Validation and a schedule, counted in batches, come at the same steps; the epoch's mean is of all its samples."""
    make, cut = Rows(samples, batch_size), Cut(2 * accumulate, tmp_path / "cut.ckpt")
    flags = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "val_check_interval": 2 * accumulate}
    expected = play(ranks, before, make, flags)
    first = play(ranks, before, make, flags, None, cut)
    second = play(ranks, after, make, flags, cut.path)
    compare([first, second], expected, samples)
    assert second["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], abs=1e-12)
    assert first["validated"] + second["validated"] == expected["validated"]
    assert second["micro"] == -(-before * accumulate // after)


@pytest.mark.parametrize("after", [2, 3])
def test_a_schedule_of_accumulation_goes_on_with_more_ranks(ranks: RankPool, after: int, tmp_path: Path) -> None:
    """Of 4 batches of one rank in a step, then of 2, each of several ranks takes its share."""
    make, cut = Rows(59, 4), Cut(4, tmp_path / "cut.ckpt")

    def flags() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 4, 1: 2})], "max_epochs": 2}

    expected = life(make, flags())
    first = life(make, flags(), None, cut)
    compare([first, play(ranks, after, make, flags(), cut.path)], expected, 59)


FOUR = [(before, after) for before in range(1, 5) for after in range(1, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("before", "after"), FOUR)
def test_everywhere_as_one_process(
    ranks: RankPool, before: int, after: int, accumulate: int, windows: int, tmp_path: Path
) -> None:
    """Stopped in the middle of an epoch, or of its second one; then moved once more, and back."""
    make = Rows(47, 3)
    flags = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    windows = min(windows, 2 * -(-47 // (3 * before * accumulate)) - 2)
    expected = life(make, {**flags, "accumulate_grad_batches": before * accumulate})
    cuts = [CutAfterStep(windows, tmp_path / "first.ckpt"), CutAfterStep(1, tmp_path / "second.ckpt")]
    saves = {**flags, "enable_checkpointing": True}
    first = until(windows, play(ranks, before, make, saves, None, cuts[0]))
    second = until(windows + 1, play(ranks, after, make, saves, cuts[0].path, cuts[1]))
    third = play(ranks, before, make, flags, cuts[1].path)
    compare([first, second, third], expected, 47)


def test_a_window_under_way_is_begun_again_and_a_move_is_resumed_to_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Inside a window, gradients are of the ranks that were; on as many ranks as before they go on."""
    make = Rows(59, 4)
    flags = {"module": EveryOther, "accumulate_grad_batches": 3, "max_epochs": 2}
    expected = play(ranks, 2, make, flags)
    cuts = [Cut(4, tmp_path / "first.ckpt"), Cut(3, tmp_path / "second.ckpt")]
    first = play(ranks, 2, make, flags, None, cuts[0])
    first["seen"] = [sample for sample in first["seen"] if sample[1] == 0]
    whole = play(ranks, 3, make, flags, cuts[0].path)
    compare([first, whole], expected, 59)
    alone = Cut(4, tmp_path / "alone.ckpt", alone=True)
    play(ranks, 2, make, flags, None, alone)
    compare([first, play(ranks, 1, make, flags, alone.path)], expected, 59)
    second = play(ranks, 3, make, flags, cuts[0].path, cuts[1])
    third = play(ranks, 3, make, flags, cuts[1].path)
    assert torch.equal(third["weights"], whole["weights"])
    assert third["metrics"] == whole["metrics"]
    assert by_step(second["seen"] + third["seen"]) == by_step(whole["seen"])


class Adam(Reads):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_optimizers_whose_work_is_shared_go_on(ranks: RankPool, tmp_path: Path) -> None:
    make, flags = Rows(59, 4), {"max_epochs": 2, "module": Adam}
    sharded = {**flags, "strategy": DDPStrategy(shard_optimizer=True)}
    expected = life(make, {**flags, "accumulate_grad_batches": 3})
    cut = Cut(2, tmp_path / "sharded.ckpt")
    first = play(ranks, 3, make, sharded, None, cut)
    for world, given in ((2, sharded), (1, flags)):
        compare([first, play(ranks, world, make, given, cut.path)], expected, 59)


def test_what_is_said_of_it(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    make, flags, cut = Rows(59, 4), {"max_epochs": 1}, Cut(1, tmp_path / "cut.ckpt")
    first = play(ranks, 2, make, flags, None, cut)

    def told(make: Any = make, **changed: Any) -> str:
        caplog.clear()
        recwarn.clear()
        found = play(ranks, 1, make, {**flags, **changed}, cut.path)
        if "module" not in changed:
            assert sorted(s for _, _, s in first["seen"] + found["seen"]) == list(range(59))
        said = [r.getMessage() for r in caplog.records] + [str(w.message) for w in recwarn.list]
        return next(line for line in said if line.startswith("trainer.fit: the "))

    assert told() == (
        "trainer.fit: the run was planned as 2 ranks x batch_size=4 x accumulate_grad_batches=1 = 8 samples a step. "
        "On 1 rank each step keeps its samples, as 2 micro-batches of 4 on each rank. Flags that count batches still "
        "count batches of 2 ranks."
    )
    planned = "2 ranks x batch_size=4 x accumulate_grad_batches=1 = 8 samples a step"
    had = f"trainer.fit: the checkpoint was saved with {planned}; this run has "
    assert told(keep_global_batch=False) == (
        had + "1 rank x batch_size=4 x accumulate_grad_batches=1 = 4 samples a step, a different global batch "
        "(keep_global_batch=False)."
    )
    for given, size, accumulate, other in (
        (make, 4, 3, "a different"),
        (Rows(59, 8), 8, 1, "the same"),
    ):
        assert told(given, accumulate_grad_batches=accumulate) == (
            f"{had}1 rank x batch_size={size} x accumulate_grad_batches={accumulate} = {size * accumulate} samples a "
            f"step, {other} global batch (batch_size or accumulate_grad_batches was changed, and the new value applies "
            "from now on)."
        )


def test_by_hand_a_step_has_what_the_user_gives_it(ranks: RankPool, tmp_path: Path) -> None:
    make, flags, cut = Rows(59, 4), {"max_epochs": 1, "module": ByHand}, Cut(2, tmp_path / "cut.ckpt")
    first = play(ranks, 2, make, flags, None, cut)
    with pytest.warns(UserWarning, match=r"a different global batch \(in manual optimization lockstep cannot"):
        fewer = play(ranks, 1, make, flags, cut.path)
    assert sorted(s for _, _, s in first["seen"] + fewer["seen"]) == list(range(59))
    more = play(ranks, 3, make, flags, cut.path)
    expected = play(ranks, 2, make, flags)
    assert by_step(first["seen"] + more["seen"]) == by_step(expected["seen"])


def test_lists_of_metrics_are_put_together_and_what_cannot_be_is_said() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def told(make: Any, *values: list[float]) -> Any:
        parts = []
        for of_rank in values:
            metric = make()
            for value in of_rank:
                metric.update(torch.tensor(value))
            parts.append({"states": metric._copy_state_dict(), "count": metric._update_count})
        found = make()
        load_metric(found, parts)
        return found

    assert told(torchmetrics.CatMetric, [1.0], [6.0, 2.0]).compute().tolist() == [1.0, 6.0, 2.0]

    class Own(torchmetrics.SumMetric):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self._reductions["sum_value"] = None

    assert told(Own, [1.0]).compute() == 1.0
    with pytest.warns(UserWarning, match="Own has a state that cannot be merged from several ranks"):
        assert told(Own, [1.0], [2.0])._update_count == 0
