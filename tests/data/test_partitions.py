"""Cuts: every position on one rank once, parts as even as they can be or by weight, windows that stay what they are
while the number of ranks changes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.partition import Partition, WindowPlan, even_span
from lockstep.data.stream import DrawHistory, Sizes

CUTS = st.builds(Partition, st.integers(0, 200), st.integers(1, 9), st.integers(1, 6), st.booleans())
small = st.integers(1, 7)
numbers = st.one_of(st.integers(1, 9), st.floats(0.01, 100.0))


@st.composite
def weighted(draw: st.DrawFn) -> Partition:
    """Cuts by weight, in windows of any size."""
    size = draw(st.integers(1, 6))
    weights = tuple(draw(st.lists(numbers, min_size=size, max_size=size)))
    window = draw(st.integers(0, 60))
    cut = Partition(draw(st.integers(0, 200)), draw(small), size, draw(st.booleans()), window, weights)
    return Partition(cut.n, cut.batch, size, cut.drop_last, window, weights, draw(small), draw(small))


def positions(cut: Partition) -> list[list[list[int]]]:
    """Of each micro-batch, each rank's positions."""
    numbers = range(cut.number, cut.length)
    return [[list(range(*cut.span(number, rank))) for rank in range(cut.size)] for number in numbers]


def windows(cut: Partition, micro: int) -> list[list[int]]:
    """The positions of each window, in order."""
    parts = positions(cut)
    found = [parts[start : start + micro] for start in range(0, len(parts), micro)]
    return [[one for ranks in window for rank in ranks for one in rank] for window in found]


# -- even parts


@given(cut=CUTS)
def test_ranks_take_every_position_once(cut: Partition) -> None:
    spans = [cut.span(number, rank) for number in range(cut.length) for rank in range(cut.size)]
    taken = [position for start, stop in spans for position in range(start, stop)]
    kept = cut.full * cut.batch * cut.size if cut.drop_last else cut.n
    assert taken == list(range(kept))


@given(cut=CUTS)
def test_sizes_are_those_of_the_parts_and_differ_by_at_most_one(cut: Partition) -> None:
    for number in range(cut.length):
        sizes = [stop - start for start, stop in (cut.span(number, rank) for rank in range(cut.size))]
        assert cut.sizes(number) == sizes
        assert max(sizes) - min(sizes) <= (1 if number == cut.full else 0)


@given(full=st.integers(1, 5), batch=st.integers(1, 5), size=st.integers(1, 5))
def test_ranks_and_accumulation_see_the_same_micro_batches(full: int, batch: int, size: int) -> None:
    alone, shared = Partition(full * batch * size, batch, 1), Partition(full * batch * size, batch, size)
    windows = [[alone.span(number * size + i, 0) for i in range(size)] for number in range(full)]
    assert windows == [[shared.span(number, rank) for rank in range(size)] for number in range(full)]


def test_a_rest_smaller_than_the_ranks_leaves_some_without() -> None:
    assert [even_span(2, 3, rank, start=10) for rank in range(3)] == [(10, 11), (11, 12), (12, 12)]


# -- parts by weight


@given(cut=weighted())
def test_by_weight_every_position_is_taken_once(cut: Partition) -> None:
    parts = positions(cut)
    taken = [position for ranks in parts for rank in ranks for position in rank]
    window = cut.window or cut.batch * cut.size
    left = cut.n % window if cut.drop_last else 0
    assert taken == list(range(cut.position, cut.position + cut.n - left))
    for number, ranks in enumerate(parts, cut.number):
        assert list(map(len, ranks)) == cut.sizes(number)
        assert any(ranks), "no micro-batch is empty on all ranks"
    full = [cut.sizes(number) for number in range(cut.number, cut.full)]
    assert full == full[:1] * len(full)
    assert all(map(all, full))


@given(cut=weighted())
def test_by_weight_a_ranks_part_of_a_window_is_its_quota_rounded(cut: Partition) -> None:
    micro = -(-(cut.window or cut.batch * cut.size) // (cut.batch * cut.size))
    exact = [Fraction(weight) for weight in cut.weights]
    sizes = [cut.sizes(number) for number in range(cut.number, cut.length)]
    for start in range(0, len(sizes), micro):
        window = sizes[start : start + micro]
        for rank, of_rank in enumerate(zip(*window, strict=True)):
            quota = sum(map(sum, window)) * exact[rank] / sum(exact)
            assert math.floor(quota) <= sum(of_rank) <= math.ceil(quota)
            assert max(of_rank) - min(of_rank) <= 1


# -- windows on another number of ranks


@settings(max_examples=60)
@given(n=st.integers(0, 200), batch=small, before=small, after=small, accumulate=st.integers(1, 4))
def test_a_window_has_the_same_positions_on_any_number_of_ranks(
    n: int, batch: int, before: int, after: int, accumulate: int
) -> None:
    plan = WindowPlan(before, accumulate)
    cut = plan.partition(n, batch, after, drop_last=False)
    planned = windows(Partition(n, batch, before), accumulate)
    assert windows(cut, plan.micro(after)) == planned
    for number, parts in enumerate(positions(cut)):
        assert list(map(len, parts)) == cut.sizes(number)
        assert max(cut.sizes(number)) <= batch
        assert parts[0], "rank 0 has a sample of every micro-batch"


@settings(max_examples=60)
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
    planned = windows(Partition(n, batch, ranks, drop_last), 1)[: None if math.isinf(limit) else int(limit)]
    expected = [position for row in planned for position in row]
    drawn: list[int] = []
    reached, number = 0, 0
    for turn, (size, played) in enumerate(lives):
        plan = WindowPlan(ranks, accumulate, limit, number, reached)
        cut = plan.partition(n, batch, size, drop_last)
        micro = plan.micro(size)
        found = windows(cut, micro)
        is_last = turn == len(lives) - 1
        played = len(found) if is_last else min(played, len(expected[len(drawn) :]) // plan.window(batch))
        drawn += [position for window in found[:played] for position in window]
        reached = plan.reached(number + played * micro, batch, size)
        assert is_last or reached == len(drawn)
        number += played * micro
    assert drawn == expected


@settings(max_examples=60)
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
        plan, of_ranks = WindowPlan(planned, 1), [Sizes(rank, ranks, batch) for rank in range(ranks)]
        if plan.window(batch) < ranks:
            continue
        for sizes in of_ranks:
            sizes.repartition(plan)
        batches = played * plan.micro(ranks)
        life = DrawHistory(ranks, workers, of_ranks[0].taken(batches, workers))
        taken: set[int] = set()
        for rank, sizes in enumerate(of_ranks):
            mine = [left[worker * ranks + rank :: ranks * workers] for worker in range(workers)]
            for number, indices in enumerate(itertools.islice(sizes, batches)):
                assert 1 <= len(indices) <= batch
                taken |= set(mine[number % workers][: len(indices)])
                del mine[number % workers][: len(indices)]
        assert [sample for number, sample in enumerate(left) if life.has(number, None)] == sorted(taken)
        if workers == 1:
            assert sorted(taken) == left[: played * plan.window(batch)]
        left = [sample for sample in left if sample not in taken]
