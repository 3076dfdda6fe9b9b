"""BasePredictionWriter: every sample's prediction once, with the index of its sample, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

import lockstep
from lockstep.callbacks.prediction_writer import BasePredictionWriter
from tests.loop.pieces import QUIET, on_ranks, quiet
from tests.tools.pool import RankPool


class Squares(Dataset[Tensor]):
    """Sample ``i`` is ``i`` plus noise that is drawn, so that fetching draws random numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index)) + torch.rand(()) / 100


class Backwards:
    """A sampler of the user's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


def module_of(library: Any) -> Any:
    class Rounds(library.LightningModule):  # type: ignore[misc,name-defined]
        def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> list[int]:
            return [int(value) for value in batch.flatten()]

    return Rounds()


def writer_of(base: Any, interval: str) -> Any:
    class Writer(base):  # type: ignore[misc]
        """Keeps what it is given, as plain lists."""

        def __init__(self) -> None:
            super().__init__(interval)
            self.batches: list[Any] = []
            self.epochs: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, number: int, loader: int
        ) -> None:
            self.batches.append((loader, number, list(indices), list(prediction)))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.epochs.append(([*predictions], [[list(i) for i in loader] for loader in indices]))

    return Writer()


LOADERS: dict[str, Any] = {
    "in order": lambda n: DataLoader(Squares(n), batch_size=3),
    "shuffled": lambda n: DataLoader(Squares(n), batch_size=3, shuffle=True),
    "workers": lambda n: DataLoader(Squares(n), batch_size=3, num_workers=2),
    "sampler": lambda n: DataLoader(Squares(n), batch_size=3, sampler=Backwards(n)),
    "batch sampler": lambda n: DataLoader(Squares(n), batch_sampler=BatchSampler(Backwards(n), 2, False)),
    "one by one": lambda n: DataLoader(Squares(n), batch_size=None),
}


@pytest.mark.everyday
@pytest.mark.parametrize("order", ["lockstep", "torch"])
# In a prediction Lightning puts drop_last off and another sampler in the place of a batch sampler's, and has no indices
# without batches.
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind not in ("one by one", "batch sampler")])
def test_on_one_process_as_lightning_has_it(kind: str, order: Any, tmp_path: Path, lightning: Any) -> None:
    if kind == "shuffled" and order == "lockstep":
        pytest.skip("another permutation")
    theirs = writer_of(lightning.callbacks.BasePredictionWriter, "batch_and_epoch")
    ours = writer_of(BasePredictionWriter, "batch_and_epoch")
    for library, writer, flags in ((lightning, theirs, {}), (lockstep, ours, {"order": order})):
        torch.manual_seed(3)
        trainer = library.Trainer(callbacks=writer, **QUIET, **flags, default_root_dir=str(tmp_path))
        trainer.predict(module_of(library), LOADERS[kind](10), return_predictions=False)
    if kind == "shuffled":  # torch's loader draws a base seed first
        assert sorted(i for b in ours.batches for i in b[2]) == list(range(10))
        assert all(i == p for b in ours.batches for i, p in zip(b[2], b[3], strict=True))
    else:
        assert ours.batches == theirs.batches
        assert ours.epochs == theirs.epochs


def write_on_ranks(kind: str, count: int, calls: int) -> Any:
    writer = writer_of(BasePredictionWriter, "batch_and_epoch")
    trainer: Any = on_ranks(callbacks=writer)
    loader = LOADERS[kind](count)
    returned = [trainer.predict(module_of(lockstep), loader) for _ in range(calls)]
    assert [list(epoch[0]) for epoch in writer.epochs] == returned
    assert (trainer.predict_loop.predictions, trainer.predict_loop.epoch_batch_indices) == ([], [])
    return writer.batches, writer.epochs


@pytest.mark.everyday
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("world", "count"), [(2, 10), (3, 10), (2, 1)])
def test_every_sample_once_over_the_ranks_with_its_own_index(
    ranks: RankPool, kind: str, world: int, count: int
) -> None:
    """Lightning 2.6.6 predicts 12 of 10 samples on 3 ranks."""
    calls = 2
    found = ranks(world).run(write_on_ranks, kind, count, calls, timeout=60)
    pairs = [
        pair for batches, _ in found for _, _, indices, values in batches for pair in zip(indices, values, strict=True)
    ]
    assert all(index == value for index, value in pairs)
    assert len(pairs) == calls * count
    assert len({index for index, _ in pairs}) == count
    for batches, epochs in found:
        assert [i for _, indices in epochs for i in indices[0]] == [b[2] for b in batches]
        assert [p for predictions, _ in epochs for p in predictions] == [b[3] for b in batches]


def test_several_loaders() -> None:
    writer = writer_of(BasePredictionWriter, "batch_and_epoch")
    loaders = [DataLoader(Squares(2), batch_size=2), DataLoader(Squares(3), batch_size=2, sampler=Backwards(3))]
    returned = quiet(callbacks=writer).predict(module_of(lockstep), loaders)
    assert writer.batches == [(0, 0, [0, 1], [0, 1]), (1, 0, [2, 1], [2, 1]), (1, 1, [0], [0])]
    assert writer.epochs == [([[[0, 1]], [[2, 1], [0]]], [[[0, 1]], [[2, 1], [0]]])]
    assert returned == [[[0, 1]], [[2, 1], [0]]]


def test_limits_and_unread_indices_do_not_shift_later_batches() -> None:
    writer = writer_of(BasePredictionWriter, "batch")
    loader = DataLoader(Squares(12), batch_size=2, num_workers=1, persistent_workers=True)
    trainer = quiet(callbacks=writer, limit_predict_batches=2)
    for _ in range(2):
        trainer.predict(module_of(lockstep), loader, return_predictions=False)
    assert [(b[2], b[3]) for b in writer.batches] == 2 * [([0, 1], [0, 1]), ([2, 3], [2, 3])]


def test_the_random_numbers_of_fetching_stay_the_same() -> None:
    def predicted(callbacks: list[Any]) -> list[Tensor]:
        class Raw(lockstep.LightningModule):
            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return batch

        lockstep.seed_everything(5)
        return quiet(callbacks=callbacks).predict(Raw(), DataLoader(Squares(7), batch_size=2, shuffle=True))

    with_writer = predicted([writer_of(BasePredictionWriter, "batch")])
    assert all(torch.equal(a, b) for a, b in zip(with_writer, predicted([]), strict=True))
