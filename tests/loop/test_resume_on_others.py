"""A run that is saved after any micro-batch goes on under another engine, or on other ranks, as if it had not stopped.

Weights, logged values and torchmetrics objects are those of one process that trains without a stop. What a window's
first micro-batches had changed counts once, whether their gradients are taken over or the window is played again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep import Callback, LightningModule
from lockstep.callbacks import OnExceptionCheckpoint
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.equivalence.models import cut_by_mesh
from tests.loop.pieces import SaveAt, quiet
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(110)

SAMPLES, BATCH, ACCUMULATE, EPOCHS = 32, 4, 3, 2  # 8 micro-batches: two full windows and one of two micro-batches
PLACES = range(8)

# name -> (ranks, replicas)
ENGINES = {
    "auto": (1, 1),
    "ddp": (2, 2),
    "sharded optimizer": (2, 2),
    "fsdp": (2, 2),
    **({"balanced": (2, 1), "one process": (1, 1), "balanced 2 x 2": (4, 2)} if is_there("balancing") else {}),
    "tensor parallel": (2, 1),
    "2 x 2": (4, 2),
}
IN_PARTS = {"fsdp in parts": (2, 2), "2 x 2 in parts": (4, 2)}  # each rank writes its part of a checkpoint
KINDS = {"fsdp, shards at once": (2, 2), "fsdp, copies": (4, 4), "four": (4, 4)}
SHAPES = {**ENGINES, **IN_PARTS, **KINDS}


STRATEGIES: dict[str, Any] = {
    "sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
    "fsdp": FSDPStrategy,
    "fsdp in parts": lambda: FSDPStrategy(state_dict_type="sharded"),
    "fsdp, shards at once": lambda: FSDPStrategy(accumulate_shards=True),
    "fsdp, copies": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
    "four": lambda: "ddp",
    "2 x 2 in parts": lambda: ModelParallelStrategy(2, 2),
    "tensor parallel": lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False),
    "2 x 2": lambda: ModelParallelStrategy(2, 2, save_distributed_checkpoint=False),
    "one process": lambda: lockstep.strategies.BalancedStrategy(one_process=True, split="equal"),
    "balanced": lambda: lockstep.strategies.BalancedStrategy(stages=2),
    "balanced 2 x 2": lambda: lockstep.strategies.BalancedStrategy(stages=2),
}


class Net(LightningModule):
    """A chain of layers, with a buffer that counts the calls of its step, and everything logged that can be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]
        self.chain = nn.Sequential(*layers).double()
        self.unused = nn.Linear(2, 2).double()
        self.register_buffer("calls", torch.zeros(2))
        self.average, self.largest = torchmetrics.MeanMetric(), torchmetrics.MaxMetric()
        self.is_cut = False

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) or self.is_cut:
            return
        cut_by_mesh(self.chain, self.device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.is_cut = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, number = batch
        with torch.no_grad():
            self.calls.add_(1)
        loss = (self.chain(x).squeeze(1) - x[:, 0]).square().mean()
        seen = number.double()
        self.log("mean", seen.mean(), on_step=False, on_epoch=True, batch_size=len(x))
        self.log("both", loss, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("sum", seen.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", seen.max(), on_step=False, on_epoch=True, reduce_fx="max")
        for name, metric in (("average", self.average), ("metric of largest", self.largest)):
            metric.update(seen)
            self.log(name, metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Stream(IterableDataset[Any]):
    """The samples without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data[number] for number in range(len(self.data)))


def loader(batch: int, stream: bool = False) -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, torch.arange(SAMPLES).flip(0))
    return DataLoader(Stream(data), batch) if stream else DataLoader(data, batch, shuffle=True)


class Metrics(Callback):
    """Keeps what each epoch said."""

    def __init__(self) -> None:
        self.of_epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.of_epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


Found = tuple[dict[str, Tensor], list[dict[str, float]], list[float]]  # weights, logged, calls


def play(
    engine: str,
    folder: Path | None = None,
    load: Path | None = None,
    stream: bool = False,
    batch: int = 0,
    places: Iterable[int] = PLACES,
) -> Found:
    ranks, replicas = SHAPES[engine]
    metrics = Metrics()
    trainer = quiet(
        strategy=STRATEGIES.get(engine, lambda: engine)(),
        devices=2 if engine == "one process" else ranks,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        precision="64-true",
        log_every_n_steps=1,
        callbacks=[metrics, *([] if folder is None else [SaveAt(at, folder / f"{at}.ckpt") for at in places])],
    )
    trainer.seed = 7
    module = Net()
    trainer.fit(module, loader(batch or BATCH // replicas, stream), ckpt_path=load)
    weights = {name: value.detach().clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return weights, metrics.of_epochs, module.calls.tolist()


def resume_all(engine: str, folder: Path, places: Iterable[int], stream: bool, batch: int) -> list[Found]:
    return [play(engine, None, folder / f"{place}.ckpt", stream, batch) for place in places]


def check(found: Found, expected: Found, said: str) -> None:
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-12, msg=f"{said}: {name}")
    for epoch, values in enumerate(expected[1]):
        of_epoch = {name: value for name, value in values.items() if name != "both_step"}  # of another micro-batch
        assert {name: found[1][epoch][name] for name in of_epoch} == pytest.approx(of_epoch, abs=1e-6), (said, epoch)


def moved(
    ranks: RankPool, folder: Path, wrote: str, readers: Iterable[str], places: Iterable[int], stream: bool = False
) -> None:
    """Saved by one engine after these micro-batches, resumed by others from each."""
    expected = play("auto", stream=stream)
    saved = ranks(SHAPES[wrote][0]).run(play, wrote, folder, None, stream, 0, places, timeout=60)[0]
    check(saved, expected, f"{wrote}, not stopped")
    for reader in readers:
        world = SHAPES[reader][0]
        of_plan = BATCH // SHAPES[wrote][1]  # as it was planned; else as many samples on fewer or more replicas
        for batch in {of_plan, BATCH // SHAPES[reader][1]}:
            resumed = ranks(world).run(resume_all, reader, folder, places, stream, batch)[0]
            for place, found in zip(places, resumed, strict=True):
                check(found, expected, f"{wrote} to {reader} at {place}, batch_size={batch}")


PAIRS = [(wrote, reader) for wrote, reader in product(ENGINES, ENGINES) if wrote != reader]
DRAWN = random.Random(0).sample(PAIRS, 3)


@pytest.mark.parametrize(("wrote", "reader", "place"), [(*pair, 4 * (n % 2)) for n, pair in enumerate(DRAWN)])
def test_within_a_window_a_run_goes_on_under_another_engine(
    ranks: RankPool, tmp_path: Path, wrote: str, reader: str, place: int
) -> None:
    moved(ranks, tmp_path, wrote, [reader], [place])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrote", ENGINES)
def test_after_each_micro_batch_a_run_goes_on_under_every_engine(ranks: RankPool, tmp_path: Path, wrote: str) -> None:
    moved(ranks, tmp_path, wrote, ENGINES, PLACES)


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("wrote", "readers"),
    [
        ("fsdp in parts", ["2 x 2 in parts"]),
        ("2 x 2 in parts", ["tensor parallel"]),
        pytest.param("fsdp in parts", ["ddp", "tensor parallel", "fsdp in parts"], marks=pytest.mark.slow),
        pytest.param("2 x 2 in parts", ["ddp", "fsdp in parts", "2 x 2 in parts"], marks=pytest.mark.slow),
    ],
)
def test_parts_of_a_window_under_way_are_read_by_others(
    ranks: RankPool, tmp_path: Path, wrote: str, readers: list[str]
) -> None:
    moved(ranks, tmp_path, wrote, readers, [4])


@pytest.mark.slow
@pytest.mark.parametrize("wrote", ["fsdp, shards at once", "fsdp, copies", "four"])
def test_kinds_of_engines_go_on_as_each_other(ranks: RankPool, tmp_path: Path, wrote: str) -> None:
    moved(ranks, tmp_path, wrote, ["auto", "ddp", "fsdp, copies", "fsdp, shards at once", "2 x 2", "four"], [0, 4, 6])


# -- kinds of modules, data and files --------------------------------------------------------------------------


class Normed(Net):
    """With running statistics, and a buffer that its step puts another one in the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("replaced", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, number = batch
        self.replaced = self.replaced + 1
        return super().training_step((self.norm(x), number), batch_idx)


class Table(LightningModule):
    """A table of rows, whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(SAMPLES, 3, sparse=True).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, number = batch
        return (self.table(number) - x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ByHand(Net):
    """Steps after every third batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / ACCUMULATE)
        if batch_idx % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()


class Searches(Net):
    """Its optimizer plays windows again."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Weighs(Net):
    """Each loss comes with a weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": len(batch[0])}


def fit(module: type[LightningModule], flags: dict[str, Any], load: Path | None = None, **given: Any) -> Any:
    """Weights and buffers, and what epochs said."""
    metrics = Metrics()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    made = {"devices": ranks, "max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "precision": "64-true"}
    trainer = quiet(**{**made, **flags, "callbacks": [metrics, *flags.get("callbacks", ())]})
    trainer.seed = 7
    own = module()
    trainer.fit(own, loader(given.get("batch", BATCH // ranks), given.get("stream", False)), ckpt_path=load)
    values = {name: value.detach().clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return {**values, **{name: value.clone() for name, value in own.named_buffers()}}, metrics.of_epochs


def alike(found: Any, expected: Any, buffers: bool = True) -> None:
    for name, value in expected[0].items():
        if buffers or not name.startswith(("norm.", "calls", "replaced")):
            torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-12, msg=name)
    for there, here in zip(expected[1], found[1], strict=True):
        assert here == pytest.approx(there, abs=1e-6)


@pytest.mark.parametrize("module", [Normed, Searches])
def test_a_window_that_is_played_again_counts_once(module: type[LightningModule], tmp_path: Path) -> None:
    """Other flags hold from the window's beginning on: it is as if the run had been saved there."""
    boundary, within, other = tmp_path / "boundary.ckpt", tmp_path / "within.ckpt", {"accumulate_grad_batches": 2}
    fit(module, {"callbacks": [SaveAt(2, boundary), SaveAt(4, within)]})
    alike(fit(module, other, within), fit(module, other, boundary))


def test_a_line_search_goes_on_from_within_a_window(tmp_path: Path) -> None:
    """It has to see the window whole, which is played again."""
    path = tmp_path / "within.ckpt"
    expected = fit(Searches, {"callbacks": [SaveAt(4, path)]})
    alike(fit(Searches, {}, path), expected)


@pytest.mark.parametrize("place", [0, 4])
def test_buffers_of_a_window_that_other_ranks_play_again_count_once(
    ranks: RankPool, tmp_path: Path, place: int
) -> None:
    path = tmp_path / "within.ckpt"
    expected = fit(Normed, {"callbacks": [SaveAt(place, path)]})
    found = ranks(2).run(fit, Normed, {"strategy": "ddp"}, path, timeout=60)[0]
    assert found[0]["calls"].tolist() == expected[0]["calls"].tolist() == [16, 16]
    assert found[0]["replaced"] == expected[0]["replaced"] == 16
    assert found[0]["norm.num_batches_tracked"] == 16


@pytest.mark.everyday(3)
@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("module", [Table, ByHand, Weighs])
def test_gradients_go_on_other_ranks_whatever_they_are(
    ranks: RankPool, tmp_path: Path, module: type[LightningModule], place: int
) -> None:
    paths = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"]
    by_hand = {"accumulate_grad_batches": 1} if module is ByHand else {}
    expected = fit(module, {**by_hand, "callbacks": [SaveAt(place, paths[0])]})
    two = {**by_hand, "strategy": "ddp"}
    alike(ranks(2).run(fit, module, {**two, "callbacks": [SaveAt(place, paths[1])]}, timeout=60)[0], expected)
    alike(ranks(2).run(fit, module, two, paths[0], timeout=60)[0], expected)
    alike(fit(module, by_hand, paths[1]), expected)
    alike(ranks(2).run(fit, module, two, paths[1], timeout=60)[0], expected)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("place", [0, 4, 5])
def test_a_stream_goes_on_other_ranks_from_within_a_window(ranks: RankPool, tmp_path: Path, place: int) -> None:
    paths, of_stream = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"], partial(fit, Net, stream=True)
    expected = of_stream({"callbacks": [SaveAt(place, paths[0])]})
    saves = {"strategy": "ddp", "callbacks": [SaveAt(place, paths[1])]}
    found = [*ranks(2).run(of_stream, saves, timeout=60)[:1]]
    found += [ranks(2).run(of_stream, {"strategy": "ddp"}, paths[0], timeout=60)[0], of_stream({}, paths[1])]
    for each in found:
        alike(each, expected, buffers=False)


class Single(Net):
    """In single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].float(), batch[1]), batch_idx)


@pytest.mark.extension("deepspeed")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_plays_a_window_again_that_another_engine_began(ranks: RankPool, tmp_path: Path) -> None:
    """Its gradients are in parts of its own; the window's first micro-batches had been left out."""
    path, single = tmp_path / "within.ckpt", {"precision": "32-true"}
    expected = ranks(2).run(fit, Single, {**single, "strategy": "ddp", "callbacks": [SaveAt(4, path)]}, timeout=60)[0]
    found = ranks(2).run(fit, Single, {**single, "strategy": "deepspeed"}, path, timeout=60)[0]
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-5, check_dtype=False, msg=name)
    assert found[1][0]["mean"] == pytest.approx(expected[1][0]["mean"])


class Fails(Net):
    """Ends with an error in the second window, behind what it has logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4 and self.current_epoch == 0:
            raise ArithmeticError
        return loss


def test_what_one_process_saves_of_a_window_that_failed_is_its_beginning(tmp_path: Path) -> None:
    expected = fit(Net, {})
    with pytest.raises(ArithmeticError):
        fit(Fails, {"callbacks": [OnExceptionCheckpoint(tmp_path, "failed")], "enable_checkpointing": True})
    alike(fit(Net, {}, tmp_path / "failed.ckpt"), expected)
