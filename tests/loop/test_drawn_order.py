"""Samplers whose order is no function of the epoch: their order is restored after a resume, or refused by name."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Cut, Killed, Slope, Validated, heard, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

SAMPLES = 20


class Shuffling(Sampler[int]):
    """A permutation by ``made``: here Python's own random numbers."""

    def __init__(self) -> None:
        self.made: Any = random

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.shuffle(order)
        return iter(order)

    def shuffle(self, order: list[int]) -> None:
        self.made.shuffle(order)


class ByNumpy(Shuffling):
    def __init__(self) -> None:
        self.made = np.random


class ByOwnPython(Shuffling):
    def __init__(self) -> None:
        self.made = random.Random()


class ByOwnNumpy(Shuffling):
    def __init__(self) -> None:
        self.made = np.random.default_rng()


class ByOwnRandomState(Shuffling):
    def __init__(self) -> None:
        self.made = np.random.RandomState()


class ByOwnTorch(Shuffling):
    def __init__(self) -> None:
        self.made = torch.Generator()
        self.made.seed()

    def shuffle(self, order: list[int]) -> None:
        order[:] = torch.randperm(SAMPLES, generator=self.made).tolist()


class WithState(Shuffling):
    """Its order depends on a number of its own, which it saves."""

    def __init__(self) -> None:
        self.turns = random.SystemRandom().randrange(2**30)

    def shuffle(self, order: list[int]) -> None:
        self.turns += 1
        random.Random(self.turns).shuffle(order)

    def state_dict(self) -> dict[str, int]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.turns = state["turns"]


class Unseeded(Shuffling):
    """Nobody can draw its order again."""

    def shuffle(self, order: list[int]) -> None:
        random.SystemRandom().shuffle(order)


def loader(sampler: Any, batches: str, **options: Any) -> DataLoader[Any]:
    data: Any = torch.arange(SAMPLES, dtype=torch.float64)
    if batches == "batch sampler":
        return DataLoader(data, batch_sampler=Chunks(sampler), **options)
    if batches == "plain batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False), **options)
    return DataLoader(data, batch_size=2, sampler=sampler, **options)


class Chunks(Sampler[list[int]]):
    """A batch sampler of a class of its own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        return (order[at : at + 2] for at in range(0, SAMPLES, 2))


def epochs(module: Slope) -> list[list[float]]:
    drawn = [sample for batch in module.batches for sample in batch]
    return [drawn[at : at + SAMPLES] for at in range(0, len(drawn), SAMPLES)]


def in_two(make: Callable[[], Any], path: Path, nth: int = 14, **flags: Any) -> list[list[float]]:
    """What two lives of a run of three epochs drew; the first is cut off after ``nth`` of 30 batches."""
    first, second = Slope(), Slope()
    with pytest.raises(Killed):
        quiet(max_epochs=3, callbacks=[Cut("on_train_batch_end", nth, path)], **flags).fit(first, make())
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(1)  # the process is another one
    quiet(max_epochs=3, **flags).fit(second, make(), ckpt_path=path)
    first.batches += second.batches
    return epochs(first)


KINDS = (Shuffling, ByNumpy, ByOwnPython, ByOwnNumpy, ByOwnRandomState, ByOwnTorch, WithState)
BATCHES = ("samples", "batch sampler", "plain batch sampler")


@pytest.mark.everyday
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", BATCHES)
def test_a_resume_draws_a_samplers_order_again(kind: type[Shuffling], batches: str, tmp_path: Path) -> None:
    """A sampler with NumPy's, Python's or its own randomness repeated and lost samples after a resume in mid-epoch."""
    for drawn in in_two(lambda: loader(kind(), batches), tmp_path / "cut.ckpt"):
        assert sorted(drawn) == list(range(SAMPLES))


@pytest.mark.everyday
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{"use_distributed_sampler": False}, {"order": "torch"}], ids=str)
def test_a_resume_draws_the_order_of_an_untouched_loader_again(
    kind: type[Shuffling], flags: dict[str, Any], tmp_path: Path
) -> None:
    for drawn in in_two(lambda: loader(kind(), "samples"), tmp_path / "cut.ckpt", **flags):
        assert sorted(drawn) == list(range(SAMPLES))


def test_a_plain_shuffle_by_a_generator_of_the_users_resumes_under_torchs_order(tmp_path: Path) -> None:
    def make() -> Any:
        own = torch.Generator()
        own.seed()
        return loader(None, "samples", shuffle=True, generator=own)

    for drawn in in_two(make, tmp_path / "cut.ckpt", order="torch"):
        assert sorted(drawn) == list(range(SAMPLES))


def test_a_weighted_sampler_goes_on_with_the_samples_it_had_drawn(tmp_path: Path) -> None:
    def make() -> Any:
        own = torch.Generator().manual_seed(5)
        return loader(WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=own), "samples")

    whole = Slope()
    torch.manual_seed(7)
    quiet(max_epochs=3).fit(whole, make())
    torch.manual_seed(7)
    assert in_two(make, tmp_path / "cut.ckpt") == epochs(whole)


@pytest.mark.parametrize("flags", [{}, {"use_distributed_sampler": False}])
@pytest.mark.parametrize("batches", ["samples", "batch sampler"])
def test_an_order_that_cannot_be_drawn_again_is_refused_by_name(
    flags: dict[str, Any], batches: str, tmp_path: Path
) -> None:
    name = "Chunks" if batches == "batch sampler" and not flags else "Unseeded"
    with pytest.raises(MisconfigurationException, match=f"train_dataloader: the {name} draws another order"):
        in_two(lambda: loader(Unseeded(), batches), tmp_path / "cut.ckpt", **flags)


class Unsized(Unseeded):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Unseeded, Unsized])
def test_such_a_run_goes_on_from_an_epochs_end(kind: type[Shuffling], tmp_path: Path) -> None:
    for drawn in in_two(lambda: loader(kind(), "samples"), tmp_path / "cut.ckpt", nth=10):
        assert sorted(drawn) == list(range(SAMPLES))


def test_such_a_run_goes_on_from_the_end_of_a_limited_epoch(tmp_path: Path) -> None:
    drawn = in_two(lambda: loader(Unseeded(), "samples"), tmp_path / "cut.ckpt", nth=5, limit_train_batches=5)
    assert sum(map(len, drawn)) == 3 * 10


def test_an_order_is_refused_within_a_nest_of_loaders(tmp_path: Path) -> None:
    class Nested(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["a"], batch_idx)

    def run(**more: Any) -> None:
        loaders = {"a": loader(Unseeded(), "samples"), "b": numbers(6, 2)}
        quiet(max_epochs=3, **more.pop("flags", {})).fit(Nested(), loaders, **more)

    with pytest.raises(Killed):
        run(flags={"callbacks": [Cut("on_train_batch_end", 14, tmp_path / "cut.ckpt")]})
    with pytest.raises(MisconfigurationException, match="Unseeded draws another order than it did"):
        run(ckpt_path=tmp_path / "cut.ckpt")


def play_ranks(kind: type[Shuffling], stage: str) -> str:
    try:
        if stage == "fit":
            on_ranks(max_epochs=1).fit(Slope(), loader(kind(), "samples"))
        else:
            on_ranks().validate(Validated(), loader(kind(), "samples"), verbose=False)
    except MisconfigurationException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_an_order_that_differs_between_ranks_is_refused_by_name(ranks: RankPool, stage: str) -> None:
    for told in ranks(2).run(play_ranks, Unseeded, stage):
        assert "the Unseeded draws another order on each rank" in told
    assert ranks(2).run(play_ranks, ByOwnNumpy, stage) == ["", ""]


def play_fewer(path: Path) -> Any:
    module = Slope()
    flags: dict[str, Any] = {} if path.exists() else {"callbacks": [Cut("on_train_batch_end", 3, path)]}
    with contextlib.suppress(Killed):
        on_ranks(max_epochs=1, **flags).fit(module, loader(ByOwnNumpy(), "samples"))
    return [sample for batch in module.batches for sample in batch]


def test_other_ranks_go_on_with_the_order_of_an_unseeded_generator(ranks: RankPool, tmp_path: Path) -> None:
    """The seed that the first life's generator happened to have went with its rank's part of the checkpoint."""
    path = tmp_path / "cut.ckpt"
    seen = [sample for drawn in ranks(2).run(play_fewer, path) for sample in drawn]
    module = Slope()
    quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, loader(ByOwnNumpy(), "samples"), ckpt_path=path)
    assert sorted(seen + [sample for batch in module.batches for sample in batch]) == list(range(SAMPLES))


def play_shuffled(path: Path, epoch_end: bool) -> Any:
    """What one life drew, and what it was told of permutations; the first one ends in mid-epoch, or at its end."""
    module, nth = Slope(), SAMPLES // 2 if epoch_end else 3
    flags: dict[str, Any] = {} if path.exists() else {"callbacks": [Cut("on_train_batch_end", nth, path)]}
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(Killed):
        warnings.simplefilter("always")
        quiet(max_epochs=2, order="torch", devices=max(1, comm.world_size()), **flags).fit(
            module, loader(None, "samples", shuffle=True), ckpt_path=path if path.exists() else None
        )
    return module.batches, any("draws another permutation" in str(each.message) for each in caught)


@pytest.mark.parametrize("epoch_end", [False, True])
def test_a_resume_from_one_process_on_several_is_said_under_torchs_order(
    epoch_end: bool, ranks: RankPool, tmp_path: Path
) -> None:
    """It was not: samples came twice and others never, in silence."""
    path = tmp_path / "cut.ckpt"
    assert not play_shuffled(path, epoch_end)[1]
    of_ranks = ranks(2).run(play_shuffled, path, epoch_end)
    assert of_ranks[0][1] is not epoch_end
    if epoch_end:
        assert sorted(s for drawn, _ in of_ranks for batch in drawn for s in batch) == list(range(SAMPLES))
    assert not play_shuffled(path, epoch_end)[1]


class OtherStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        begin = random.SystemRandom().randrange(2**30)
        return iter(torch.arange(begin, begin + SAMPLES, dtype=torch.float64))


class SameStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randperm(SAMPLES).double())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_begins_with_another_sample_after_a_resume_is_said(workers: int, tmp_path: Path) -> None:
    def told(kind: Any) -> list[str]:
        make = lambda: DataLoader(kind(), batch_size=2, num_workers=workers)  # noqa: E731
        return heard(lambda: in_two(make, tmp_path / "cut.ckpt"), "does not begin with")

    (said,) = told(OtherStream)
    assert "train_dataloader" in said
    assert "OtherStream" in said
    assert not told(SameStream)
