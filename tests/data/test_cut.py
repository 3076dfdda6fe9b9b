"""Cuts: every position on one rank once, parts as even as they can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.cut import Cut, even_span

CUTS = st.builds(Cut, st.integers(0, 200), st.integers(1, 9), st.integers(1, 6), st.booleans())


@given(cut=CUTS)
def test_ranks_take_every_position_once(cut: Cut) -> None:
    spans = [cut.span(number, rank) for number in range(cut.length) for rank in range(cut.size)]
    taken = [position for start, stop in spans for position in range(start, stop)]
    kept = cut.full * cut.batch * cut.size if cut.drop_last else cut.n
    assert taken == list(range(kept))


@given(cut=CUTS)
def test_weights_are_the_sizes_of_the_parts_and_differ_by_at_most_one(cut: Cut) -> None:
    for number in range(cut.length):
        sizes = [stop - start for start, stop in (cut.span(number, rank) for rank in range(cut.size))]
        assert cut.weights(number) == sizes
        assert max(sizes) - min(sizes) <= (1 if number == cut.full else 0)


@given(cut=CUTS)
def test_one_rank_cuts_as_a_plain_loader_does(cut: Cut) -> None:
    alone = Cut(cut.n, cut.batch, 1, cut.drop_last)
    assert alone.length == (cut.n // cut.batch if cut.drop_last else -(-cut.n // cut.batch))


@given(full=st.integers(1, 5), batch=st.integers(1, 5), size=st.integers(1, 5))
def test_ranks_and_accumulation_see_the_same_micro_batches(full: int, batch: int, size: int) -> None:
    alone, shared = Cut(full * batch * size, batch, 1), Cut(full * batch * size, batch, size)
    windows = [[alone.span(number * size + i, 0) for i in range(size)] for number in range(full)]
    assert windows == [[shared.span(number, rank) for rank in range(size)] for number in range(full)]


def test_a_rest_smaller_than_the_ranks_leaves_some_without() -> None:
    assert [even_span(2, 3, rank, start=10) for rank in range(3)] == [(10, 11), (11, 12), (12, 12)]
