"""Fragments of parameters in slices: every element is in one, and starts where kernels want it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.bucket import offsets
from lockstep.parallel.zero.exchange import STEP, Fragment, fragments, padded


@given(
    numels=st.lists(st.integers(0, 300), max_size=8),
    world=st.integers(1, 5),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_every_element_lies_in_one_fragment_that_begins_at_a_step(numels: list[int], world: int, itemsize: int) -> None:
    starts, end = offsets(numels, itemsize, STEP)
    length = padded(end, itemsize, world)
    assert length >= end
    assert length % world == 0
    size = length // world
    covered = [0] * len(numels)
    for rank in range(world):
        for index, part in enumerate(fragments(starts, numels, rank * size, (rank + 1) * size)):
            if part.stop == part.start:
                continue
            assert part.start == covered[index]
            assert part.offset == starts[index] + part.start
            assert rank * size <= part.offset
            assert part.offset + part.stop - part.start <= (rank + 1) * size
            assert part.start * itemsize % STEP == 0
            covered[index] = part.stop
    assert covered == numels


def test_a_slice_without_a_parameter_has_an_empty_fragment_of_it() -> None:
    assert fragments([0, 64], [64, 32], 64, 96)[0] == Fragment(64, 64, 64)
