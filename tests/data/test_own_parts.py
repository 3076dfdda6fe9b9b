"""Streams that shard themselves over the ranks: every sample once, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data.feed import EvaluationFeed, Feed
from lockstep.data.own_parts import shards_itself
from lockstep.data.source import Replicas
from lockstep.ground.errors import MisconfigurationException
from tests.data.loaders import drawn, epoch, indices, loader
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)
COUNT = 23


class InIter(IterableDataset[Any]):
    """Looks for its rank when it is read."""

    def part(self) -> range:
        return range(dist.get_rank(), COUNT, dist.get_world_size())

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.tensor([number, 0]) for number in self.part())


class OfWorkers(InIter):
    """Shards itself over ranks and workers, by the variables of the environment, as webdataset does."""

    def part(self) -> range:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return range(COUNT)[rank::size][worker::workers]


class Uneven(InIter):
    """All but three of its samples are the first rank's."""

    def part(self) -> range:
        return range(3, COUNT) if dist.get_rank() == 0 else range(3)


class AllOfOne(InIter):
    """The second rank has none."""

    def part(self) -> range:
        return range(COUNT) if dist.get_rank() == 0 else range(0)


class AlikeAtFirst(InIter):
    """Its parts begin alike."""

    def __iter__(self) -> Iterator[Any]:
        yield torch.tensor([-1, 0])
        yield from super().__iter__()


class Shared(InIter):
    """The same samples on each rank, in a random order."""

    def part(self) -> Any:
        return torch.randperm(COUNT).tolist()


class SharedByWorkers(InIter):
    """The same on each rank; its workers shard it, of which the last ones have next to nothing."""

    def part(self) -> Any:
        info = get_worker_info()
        return range(COUNT)[0 if info is None else 20 :] if info is not None and info.id else range(20)


def play(kind: type[InIter], workers: int, how: str) -> tuple[list[int], bool]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    made: Any = DataLoader(kind(), 2, num_workers=workers, persistent_workers=workers > 0)
    if how == "evaluated":
        feed: Any = EvaluationFeed.of(made, replicas=Replicas(rank, size), seed=1)
        found = []
        for number in range(2):
            feed.begin(number)
            found = [index for batch, _, _, _ in feed for index in indices(batch)]
    else:
        beside = {"one": made, "other": loader(40)} if how == "beside another" else made
        feed = Feed.train(beside, replicas=Replicas(rank, size), seed=1)
        for number in range(2):
            steps = epoch(feed, number, accumulate=2)
            batches = [(batch["one"] if isinstance(batch, dict) else batch, weight) for batch, weight, _ in steps]
            found = [index for batch, weight in batches if batch is not None and weight for index in indices(batch)]
    feed.close()
    return found, feed._source.own if how == "trained" else True


CASES = [
    (InIter, 0, "trained"),
    (OfWorkers, 2, "trained"),
    (AllOfOne, 0, "evaluated"),
    pytest.param(Uneven, 1, "trained", marks=pytest.mark.slow),
    pytest.param(OfWorkers, 2, "evaluated", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "workers", "how"), CASES)
def test_each_sample_of_a_stream_that_shards_itself_is_seen_once(
    ranks: RankPool, kind: Any, workers: int, how: str
) -> None:
    """It was shared out twice: half of its samples were never seen, of which a warning told."""
    found = ranks(2).run(play, kind, workers, how, timeout=50)
    assert sorted(found[0][0] + found[1][0]) == list(range(COUNT))


@pytest.mark.parametrize(("kind", "workers"), [(Shared, 0), (Shared, 2), (SharedByWorkers, 2)])
def test_what_is_the_same_on_all_ranks_is_shared_out(ranks: RankPool, kind: Any, workers: int) -> None:
    """In a random order, too, and where a worker of one rank only has a sample."""
    found = ranks(2).run(play, kind, workers, "trained", timeout=50)
    assert sorted(found[0][0] + found[1][0]) == list(range(COUNT))
    assert [own for _, own in found] == [False, False]


def test_parts_may_begin_with_the_same_sample(ranks: RankPool) -> None:
    found = ranks(2).run(play, AlikeAtFirst, 0, "trained")
    assert sorted(found[0][0] + found[1][0]) == [-1, -1, *range(COUNT)]


class Sized(InIter):
    def __len__(self) -> int:
        return len(self.part())


def refused() -> str:
    with pytest.raises(MisconfigurationException) as raised:
        epoch(Feed.train(DataLoader(Sized(), 2), replicas=Replicas(dist.get_rank(), 2), seed=1))
    return str(raised.value)


def test_parts_with_a_length_that_may_mean_either_are_refused(ranks: RankPool) -> None:
    """Taken as the length of all samples it would have cut each rank's part in half."""
    # of 24 samples both ranks have as many, else their lengths differ, which is refused before
    for said in ranks(2).run(refused):
        assert "Sized" in said or "train_dataloader is not the same on all ranks" in said
        assert "Trainer(use_distributed_sampler=False)" in said


# -- what is known ---------------------------------------------------------------------------------------------


class Pipeline(InIter):
    """With the parts of webdataset's ``DataPipeline`` that matter."""

    def __init__(self, split: Any) -> None:
        self.pipeline = [iter, split]

    def __len__(self) -> int:
        return COUNT


def split_by_node(source: Any) -> Any:
    return source


def single_node_only(source: Any) -> Any:
    return source


def test_data_sets_that_are_known_to_shard_themselves() -> None:
    streaming = type("StreamingDataset", (InIter,), {"__module__": "streaming.base.dataset"})
    split = type("Split", (InIter,), {"_distributed": (0, 2)})
    assert all(map(shards_itself, [Pipeline(split_by_node), type("Own", (streaming,), {})(), split()]))
    assert not any(map(shards_itself, [Pipeline(single_node_only), InIter()]))


# -- a pass that goes on ---------------------------------------------------------------------------------------


def gone_on(kind: type[InIter]) -> list[int]:
    """What is drawn in the three micro-batches before a checkpoint, and behind it."""
    replicas = Replicas(dist.get_rank(), 2)
    feed = Feed.train(DataLoader(kind(), 2), replicas=replicas, seed=1)
    feed.begin(0)
    windows = feed.windows(1)
    before = [index for _ in range(3) for batch, _, _ in next(windows) for index in indices(batch)]
    resumed = Feed.train(DataLoader(kind(), 2), replicas=replicas, seed=1)
    resumed.load_state_dict(feed.state_dict())
    return before + drawn([step for step in epoch(resumed, 0, start=3) if step[1]])


@pytest.mark.parametrize("kind", [InIter, Uneven])
def test_a_pass_over_parts_goes_on(ranks: RankPool, kind: Any) -> None:
    first, second = ranks(2).run(gone_on, kind)
    assert sorted(first + second) == list(range(COUNT))


def of_webdataset(folder: str, workers: int) -> list[int]:
    import webdataset as wds

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    shards = [f"{folder}/{number}.tar" for number in range(5)]
    if dist.get_rank() == 0:
        for number, shard in enumerate(shards):
            with wds.TarWriter(shard) as out:
                for key in range(3):
                    out.write({"__key__": f"{number}{key}", "txt": str(3 * number + key)})
    dist.barrier()
    options = {"nodesplitter": wds.split_by_node, "shardshuffle": False, "empty_check": False}
    data = wds.WebDataset(shards, **options).decode().to_tuple("txt").map_tuple(int)
    feed = Feed.train(DataLoader(data, 2, num_workers=workers), replicas=Replicas(dist.get_rank(), 2), seed=1)
    return [int(number) for batch, weight, _ in epoch(feed) if weight for number in batch[0]]


def of_datasets(folder: str, workers: int) -> list[int]:
    import datasets
    from datasets.distributed import split_dataset_by_node

    table = datasets.table.InMemoryTable.from_pydict({"x": list(range(15))})
    data = datasets.Dataset(table, fingerprint="numbers").to_iterable_dataset(num_shards=4)
    data = split_dataset_by_node(data, rank=dist.get_rank(), world_size=2)
    feed = Feed.train(DataLoader(data, 2, num_workers=workers), replicas=Replicas(dist.get_rank(), 2), seed=1)
    return [int(number) for batch, weight, _ in epoch(feed) if weight for number in batch["x"]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("package", "play"), [("webdataset", of_webdataset), ("datasets", of_datasets)])
def test_packages_that_shard_themselves(ranks: RankPool, tmp_path: Any, package: str, play: Any, workers: int) -> None:
    pytest.importorskip(package)
    first, second = ranks(2).run(play, str(tmp_path), workers)
    assert sorted(first + second) == list(range(15))
