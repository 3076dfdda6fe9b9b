"""Windows that stay what they are while the number of ranks changes: no position lost, none twice, parts even."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.cut import Cut
from lockstep.data.recut import Recut, Rest, WindowPlan
from lockstep.data.stream import DrawHistory, Sizes

small = st.integers(1, 7)


def positions(cut: Cut | Recut | Rest, first: int = 0) -> list[list[list[int]]]:
    """Of each micro-batch from ``first`` on, each rank's positions."""
    numbers = range(first, cut.length)
    return [[list(range(*cut.span(number, rank))) for rank in range(cut.size)] for number in numbers]


def windows(cut: Cut | Recut | Rest, micro: int, first: int = 0) -> list[list[int]]:
    """The positions of each window, in order."""
    parts = positions(cut, first)
    found = [parts[start : start + micro] for start in range(0, len(parts), micro)]
    return [[one for ranks in window for rank in ranks for one in rank] for window in found]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 200), batch=small, before=small, after=small, accumulate=st.integers(1, 4))
def test_a_window_has_the_same_positions_on_any_number_of_ranks(
    n: int, batch: int, before: int, after: int, accumulate: int
) -> None:
    grouping = WindowPlan(before, accumulate)
    cut = grouping.cut(n, batch, after, drop_last=False)
    planned = windows(Cut(n, batch, before), accumulate)
    assert windows(cut, grouping.micro(after)) == planned
    for number, parts in enumerate(positions(cut)):
        assert list(map(len, parts)) == cut.weights(number)
        assert max(cut.weights(number)) <= batch
        assert parts[0], "rank 0 lends a sample to those that have none"


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 60), batch=small, size=small, count=st.integers(1, 3))
def test_parts_of_a_full_window_differ_by_at_most_one(window: int, batch: int, size: int, count: int) -> None:
    cut = Recut(window * count, batch, size, window)
    sizes = [len(rank) for ranks in positions(cut) for rank in ranks]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == count * cut.micro * size
    assert (cut.micro - 1) * batch * size < window  # no more micro-batches than it takes


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 200),
    batch=small,
    lives=st.lists(st.tuples(small, st.integers(0, 3)), min_size=1, max_size=4),
    accumulate=st.integers(1, 3),
    limit=st.one_of(st.just(math.inf), st.integers(1, 12)),
    drop_last=st.booleans(),
)
def test_lives_with_other_ranks_draw_what_was_left(
    n: int, batch: int, lives: list[tuple[int, int]], accumulate: int, limit: float, drop_last: bool
) -> None:
    """Each life plays some windows and leaves the rest to the next one; the last plays on to the end."""
    ranks = lives[0][0]
    planned = windows(Cut(n, batch, ranks, drop_last), 1)[: None if math.isinf(limit) else int(limit)]
    expected = [position for row in planned for position in row]
    drawn: list[int] = []
    place, number = 0, 0
    for turn, (size, played) in enumerate(lives):
        grouping = WindowPlan(ranks, accumulate, limit, number, place)
        cut = grouping.cut(n, batch, size, drop_last)
        micro = grouping.micro(size)
        found = windows(cut, micro, number)
        is_last = turn == len(lives) - 1
        played = len(found) if is_last else min(played, len(expected[len(drawn) :]) // grouping.window(batch))
        drawn += [position for window in found[:played] for position in window]
        place = grouping.reached(number + played * micro, batch, size)
        assert is_last or place == len(drawn)
        number += played * micro
    assert drawn == expected


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 120),
    batch=st.integers(2, 6),
    planned=small,
    lives=st.lists(st.tuples(small, st.integers(1, 3), st.integers(0, 2)), max_size=3),
)
def test_what_lives_have_drawn_of_a_stream(n: int, batch: int, planned: int, lives: list[tuple[int, int, int]]) -> None:
    """Each worker's first samples, as a loader deals them out: to one worker after the other, batch by batch."""
    left = list(range(n))
    for ranks, workers, played in lives:
        grouping, of_ranks = WindowPlan(planned, 1), [Sizes(rank, ranks, batch) for rank in range(ranks)]
        if grouping.window(batch) < ranks:
            continue
        for sizes in of_ranks:
            sizes.group(grouping)
        batches = played * grouping.micro(ranks)
        life = DrawHistory(ranks, workers, of_ranks[0].taken(batches, workers))
        taken: set[int] = set()
        for rank, sizes in enumerate(of_ranks):
            mine = [left[worker * ranks + rank :: ranks * workers] for worker in range(workers)]
            for number, indices in enumerate(itertools.islice(sizes, batches)):
                assert 1 <= len(indices) <= batch
                taken |= set(mine[number % workers][: len(indices)])
                del mine[number % workers][: len(indices)]
        assert [sample for place, sample in enumerate(left) if life.has(place, None)] == sorted(taken)
        if workers == 1:
            assert sorted(taken) == left[: played * grouping.window(batch)]
        left = [sample for sample in left if sample not in taken]
