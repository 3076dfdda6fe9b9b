"""Loaders whose batches come ready-made: they weigh by their first tensor, which is said; all ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.ground import rank as rank_module
from tests.loop.pieces import Slope, heard, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

BATCHES = list(torch.arange(13, dtype=torch.float64).split(4))
"""4, 4, 4 and 1 samples, whose mean is 6."""


class Ready(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return BATCHES[index]

    def __len__(self) -> int:
        return len(BATCHES)


class ReadyStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(BATCHES)


class Foreign:
    """An iterable that knows nothing of torch's loaders."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(BATCHES)


class Logs(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", batch.mean(), on_step=False, on_epoch=True)
        self.log("given", batch.mean(), on_step=False, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch.mean())


LOADERS: dict[str, Callable[[], Any]] = {
    "a list": lambda: list(BATCHES),
    "a foreign iterable": Foreign,
    "batch_size=None": lambda: DataLoader(Ready(), batch_size=None),
    "a stream, batch_size=None": lambda: DataLoader(ReadyStream(), batch_size=None),
}


def logged(make: Callable[[], Any], accumulate: int, ranks: bool, **flags: Any) -> tuple[dict[str, float], list[float]]:
    trainer = (on_ranks if ranks else quiet)(max_epochs=1, accumulate_grad_batches=accumulate, **flags)
    module = Logs()
    trainer.fit(module, make(), make())
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, module.gradients


@pytest.mark.parametrize("kind", LOADERS)
def test_a_ready_made_batch_weighed_one_whatever_its_size(kind: str) -> None:
    metrics, gradients = logged(LOADERS[kind], 4, ranks=False)
    assert metrics == {"train": 6.0, "given": 7.125, "val": 6.0}
    assert gradients == [pytest.approx(6.0)]


@pytest.mark.parametrize("kind", ["batch_size=None", "a stream, batch_size=None"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_on_the_weight_of_ready_made_batches(ranks: RankPool, kind: str, world: int) -> None:
    expected, gradients = logged(LOADERS[kind], world, ranks=False)
    for found, theirs in ranks(world).run(logged, LOADERS[kind], 1, True, timeout=40):
        assert found["train"] == pytest.approx(expected["train"])
        assert found["val"] == pytest.approx(expected["val"])
        assert theirs == pytest.approx(gradients)


def own_part() -> list[Tensor]:
    return BATCHES[torch.distributed.get_rank() :: 2]


def own_loader() -> DataLoader[Any]:
    return DataLoader(torch.arange(13, dtype=torch.float64)[torch.distributed.get_rank() :: 2], batch_size=4)  # type: ignore[arg-type]


def undistributed(make: Callable[[], Any]) -> tuple[dict[str, float], list[float]]:
    return logged(make, 1, True, use_distributed_sampler=False)


def test_batches_of_data_of_its_own_weigh_by_their_size_on_each_rank(ranks: RankPool) -> None:
    """7 and 6 samples in batches of 4: the last ones have 3 and 2."""
    for metrics, gradients in ranks(2).run(undistributed, own_part, timeout=40):
        assert metrics["train"] == pytest.approx(6.0)
        assert gradients == pytest.approx([3.5, (9.5 * 4 + 12) / 5])
    for metrics, gradients in ranks(2).run(undistributed, own_loader, timeout=40):
        assert metrics["train"] == metrics["val"] == pytest.approx(6.0)
        assert gradients == pytest.approx([3.5, (8 + 10 + 12 + 9 + 11) / 5])


def said(make: Callable[[], Any], stage: str = "fit", ranks: bool = False, **flags: Any) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    rank_module.log.addHandler(handler)
    trainer, module = (on_ranks if ranks else quiet)(max_epochs=2, **flags), Logs()
    fit, validate = (lambda: trainer.fit(module, make())), (lambda: trainer.validate(module, make(), verbose=False))
    try:
        told += heard(fit if stage == "fit" else validate)
    finally:
        rank_module.log.removeHandler(handler)
    return [each for each in told if "ready-made" in each or "cannot split its samples" in each]


def test_the_size_that_was_taken_is_said_once() -> None:
    [training] = said(LOADERS["a list"])
    assert training.startswith("train_dataloader yields ready-made batches")
    assert "4 in the first batch (shape (4,))" in training
    assert '"weight": samples' in training
    [validation] = said(LOADERS["batch_size=None"], "validate")
    assert validation.startswith("val_dataloader yields ready-made batches")
    assert "batch_size=samples" in validation
    assert said(lambda: numbers(5, 2)) == []


def test_a_loader_that_every_rank_reads_whole_is_named(ranks: RankPool) -> None:
    [zero, one] = ranks(2).run(said, LOADERS["a list"], "fit", True)
    assert [each for each in zero if "train_dataloader is a list" in each and "every sample is seen 2 times" in each]
    assert one == []
    heard = ranks(2).run(partial(said, own_part, "fit", True, use_distributed_sampler=False))[0]
    assert not [each for each in heard if "share it out" in each]


class Pair(NamedTuple):
    name: list[str]
    x: Tensor


NESTS: dict[str, Callable[[Tensor], Any]] = {
    "tuples": lambda x: (x, x + 1),
    "named tuples": lambda x: Pair(["a"] * len(x), x),
    "dicts": lambda x: {"names": ["a"] * len(x), "x": x},
    "arrays": lambda x: x.numpy(),
}


class Nested(Slope):
    def take(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return batch["x"]  # type: ignore[no-any-return]
        if isinstance(batch, tuple):
            return batch[1] if isinstance(batch, Pair) else batch[0]
        return torch.as_tensor(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.take(batch)
        self.log("train", x.mean(), on_step=False, on_epoch=True)
        return super().training_step(x, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.take(batch).mean())


@pytest.mark.parametrize("kind", NESTS)
def test_a_list_of_ready_made_nests_was_taken_for_several_loaders(kind: str) -> None:
    """Each tensor of each batch was a loader of its own, from which rows were drawn side by side."""
    batches, trainer = [NESTS[kind](x) for x in BATCHES], quiet(max_epochs=1)
    trainer.fit(Nested(), batches, batches)
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {"train": 6.0, "val": 6.0}


def none_where_negative(parts: list[Tensor]) -> Tensor | None:
    batch = torch.stack(parts)
    return batch if float(batch.sum()) >= 0 else None


def weight_after_none() -> tuple[float, int]:
    module = Slope(lr=0.1)
    samples = [torch.tensor(float(value)) for value in (1, 1, -5, -5, 2, 2, 3, 3)]
    trainer = on_ranks(max_epochs=1)
    trainer.fit(module, DataLoader(samples, batch_size=2, collate_fn=none_where_negative))  # type: ignore[arg-type]
    return module.w.item(), trainer.global_step


def test_a_batch_that_is_none_on_one_rank_leaves_the_step_to_the_others(ranks: RankPool) -> None:
    """Once it went to training_step. Half of the first step's samples are gone: -0.1 * 1/2 - 0.1 * 5/2."""
    for weight, steps in ranks(2).run(weight_after_none, timeout=40):
        assert (round(weight, 6), steps) == (-0.3, 2)
