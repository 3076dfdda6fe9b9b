"""Evaluation feeds: each sample once on one rank, loader after loader, under limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lockstep.data.combined import CombinedLoader
from lockstep.data.feed import EvaluationFeed
from lockstep.data.source import Replicas
from tests.data.loaders import Augmented, Stream, alike, indices, loader


def made(source: Any, rank: int = 0, size: int = 1, **arguments: Any) -> EvaluationFeed:
    gather = alike(size) if size > 1 else None
    return EvaluationFeed.of(source, replicas=Replicas(rank, size, gather), seed=1, **arguments)


@given(n=st.integers(1, 50), batch=st.integers(1, 6), size=st.integers(1, 5), shuffle=st.booleans())
@settings(max_examples=60)
def test_each_sample_once_and_shares_that_differ_by_one(n: int, batch: int, size: int, shuffle: bool) -> None:
    feeds = [made(loader(n, batch, shuffle), rank, size) for rank in range(size)]
    ranks = [list(feed) for feed in feeds]
    taken = [i for items in ranks for part, _, _, _ in items for i in indices(part)]
    assert sorted(taken) == list(range(n))
    shares = [sum(weight for _, _, _, weight in items) for items in ranks]
    assert max(shares) - min(shares) <= 1
    assert [len(indices(part)) for items in ranks for part, _, _, _ in items] == [
        weight for items in ranks for _, _, _, weight in items
    ]
    assert feeds[0].num_batches == [max(map(len, ranks))]


def test_loaders_come_one_after_the_other() -> None:
    feed = made([loader(5, 2, False), loader(3, 2, False)], limit=[2, None])
    assert feed.sequential
    assert feed.num_batches == [2, 2]
    items = [(indices(batch), index, number, weight) for batch, index, number, weight in feed]
    assert items == [([0, 1], 0, 0, 2.0), ([2, 3], 1, 0, 2.0), ([0, 1], 0, 1, 2.0), ([2], 1, 1, 1.0)]
    assert list(made([])) == list(made([], 0, 2)) == []
    feed.begin(0, limit=1)
    assert [(index, number) for _, index, number, _ in feed] == [(0, 0), (0, 1)]


def test_a_combined_loaders_mode_is_kept() -> None:
    feed = made(CombinedLoader({"a": loader(5, 2, False), "b": loader(2, 2, False)}, "max_size"), limit=2)
    assert not feed.sequential
    assert feed.num_batches == [2]
    items = [(batch["a"], batch["b"], index, number, weight) for batch, index, number, weight in feed]
    assert [indices(a) for a, _, _, _, _ in items] == [[0, 1], [2, 3]]
    assert [None if b is None else indices(b) for _, b, _, _, _ in items] == [[0, 1], None]
    assert [rest for _, _, *rest in items] == [[0, 0, 2.0], [1, 0, 2.0]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_shared_and_its_samples_counted(workers: int) -> None:
    taken = []
    for rank in range(2):
        feed = made(DataLoader(Stream(11), 3, num_workers=workers), rank, 2)
        assert feed.num_batches == [float("inf")]
        for batch, _, _, weight in feed:
            assert weight == len(batch)
            taken += indices(batch)
    assert sorted(taken) == list(range(11))


def test_random_numbers_follow_the_epoch_and_the_stage() -> None:
    def drawn(epoch: int, flag: str = "limit_val_batches") -> list[Any]:
        feed = made(DataLoader(Augmented(6), 4), flag=flag)
        feed.begin(epoch)
        return torch.cat([batch for batch, _, _, _ in feed]).tolist()

    state = torch.get_rng_state()
    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, "limit_test_batches")
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_side_by_side_end_and_begin_anew_on_all_ranks_alike(mode: Any, shuffle: bool) -> None:
    """The samples that the last row has for one rank alone came twice, or never."""

    def seen(size: int, rows: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"a": [], "b": []}
        for rank in range(size):
            both = CombinedLoader({"a": loader(3, 1, shuffle), "b": loader(6, 2, shuffle)}, mode)
            drawn = list(made(both, rank, size))
            assert [batch_idx for _, batch_idx, _, _ in drawn] == list(range(len(drawn)))
            assert len(drawn) <= rows
            for batch, _, _, weight in drawn:
                assert weight > 0
                for name, part in batch.items():
                    found[name] += indices(part)
        return {name: sorted(samples) for name, samples in found.items()}

    whole = {"a": list(range(3)), "b": list(range(6))}
    assert seen(1, 3) == whole
    assert seen(2, 2) == whole
    assert seen(4, 1) == whole


def test_a_loader_that_cycles_begins_anew_on_all_ranks_at_once() -> None:
    found: dict[str, list[int]] = {"a": [], "b": []}
    for rank in range(2):
        both = CombinedLoader({"a": loader(3, 1, False), "b": loader(9, 1, False)}, "max_size_cycle")
        for batch, *_ in made(both, rank, 2):
            for name, part in batch.items():
                found[name] += indices(part)
    assert sorted(found["b"]) == list(range(9))
    assert sorted(found["a"]) == [0, 0, 0, 1, 1, 1, 2, 2]  # five rows: two passes of two rows, and one row more
