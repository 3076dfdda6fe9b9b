"""The space of a search: combinations by number, drawn ones by seed, and nothing listed."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.extensions.search.grid import Options, Range, Space, convert, make_options, make_range, numbers
from lockstep.ground.errors import MisconfigurationException

LISTS = st.lists(st.lists(st.integers(), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=50)
@given(LISTS)
def test_the_grid_is_the_product_with_the_first_option_slowest(lists: list[list[int]]) -> None:
    space = Space({str(at): Options(tuple(values)) for at, values in enumerate(lists)})
    expected = [{str(at): value for at, value in enumerate(row)} for row in itertools.product(*lists)]
    assert [space.at(number) for number in range(space.size)] == expected


@settings(max_examples=50)
@given(LISTS, st.integers(0, 1 << 40))
def test_a_random_search_over_lists_takes_each_combination_once(lists: list[list[int]], seed: int) -> None:
    space = Space({str(at): Options(tuple(range(len(values)))) for at, values in enumerate(lists)})
    drawn = [tuple(space.draw(seed, number).values()) for number in range(space.size)]
    assert len(set(drawn)) == space.size


def test_a_grid_of_a_billion_combinations_takes_under_a_megabyte() -> None:
    tracemalloc.start()
    try:
        values = [make_options("--x", range(1000), int) for _ in range(2)]
        space = Space(
            {"a": values[0], "b": values[1], "c": make_range("--c", 1, 1000, 1000, type=int)}
            | {"d": make_range("--d", 1e-4, 1.0, 10**9, log_base=10)}
        )
        assert space.size == 10**18
        with pytest.raises(MisconfigurationException, match=r"nb_trials=9, but the grid has 10+ combinations \(a 1000"):
            numbers(space, "grid_search", 9)
        assert space.at(10**18 - 1) == {"a": 999, "b": 999, "c": 1000, "d": 1.0}
        assert len({str(space.draw(1, number)) for number in range(50)}) == 50
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    space = Space({"lr": make_range("--lr", 1e-4, 1e-1, log_base=10), "layers": Options((16, 32, 64))})
    # the same on each machine and in each process: numbers that were seen once; a power's last bits may differ
    assert space.draw(0, 3) == {"lr": pytest.approx(0.041613138550176516, rel=1e-14), "layers": 32}
    assert space.draw(1, 3) != space.draw(0, 3)


@settings(max_examples=50)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 50), st.booleans(), st.booleans(), st.randoms())
def test_points_of_a_range_ascend_from_low_to_high(
    one: float, other: float, samples: int, whole: bool, log: bool, random: Any
) -> None:
    low, high = sorted([one, other])
    if whole:
        low, high = float(int(low) + 1), float(int(high) + 1)
    made = make_range("--x", low, high, samples, 10 if log else None, int if whole else float)
    points = [made[at] for at in range(len(made))]
    assert points == sorted(points)
    assert points[0] == low
    assert len(points) == 1 or points[-1] == high
    if whole:
        assert all(isinstance(point, int) for point in points)
        assert len(set(points)) == len(points)
    assert low <= made.draw(random) <= high


def test_a_logarithmic_range_has_equal_factors() -> None:
    made = make_range("--lr", 1e-4, 1e-1, 4, 10)
    assert [made[at] for at in range(4)] == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])


def test_integers_that_fall_together_count_once() -> None:
    points = make_range("--x", 1, 100, 8, 2, int)
    assert [points[at] for at in range(len(points))] == [1, 2, 4, 7, 14, 27, 52, 100]
    assert len(make_range("--x", 1, 3, 10, None, int)) == 3
    assert len(make_range("--x", 1, 3, 10, 2, int)) == 3


def test_a_list_among_the_options_is_each_trials_own() -> None:
    space = Space({"sizes": Options(([1, 2], [3]))})
    space.at(0)["sizes"].append(9)
    assert space.at(0)["sizes"] == [1, 2]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ([], float, r"options=\[\]\): there is no value to try"),
        (None, float, r"options=None\): options must be a list"),
        ("abc", None, r"options='abc'\): options must be a list"),
        (["a"], float, r"the value 'a' cannot be converted by type=float"),
        ([{}], int, r"the value \{\} cannot be converted by type=int"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, kind: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        make_options("--lr", options, kind)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None, 1), "low must be a finite number"),
        ((0, float("inf")), "high must be a finite number"),
        ((0, float("nan")), "high must be a finite number"),
        ((True, 1), "low must be a finite number"),
        ((2, 1), "low must not be larger than high"),
        ((0, 1, 0), "nb_samples=0"),
        ((0, 1, 5, 10), "low must be above 0 on a logarithmic scale"),
        ((1, 2, 5, 1), "log_base=1"),
        ((1, 2.5, 5, None, int), "low and high must be integers"),
    ],
)
def test_ranges_that_cannot_be_are_refused(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        make_range("--lr", *arguments)


@pytest.mark.parametrize("strategy", ["grid_search", "random_search"])
@pytest.mark.parametrize("wrong", [0, -1, True, 2.0])
def test_a_number_of_trials_that_is_none_is_refused(strategy: str, wrong: Any) -> None:
    with pytest.raises(MisconfigurationException, match="pass an integer of at least 1"):
        numbers(Space({"x": Options((1,))}), strategy, wrong)


def test_more_trials_than_combinations_are_not_made_up() -> None:
    space = Space({"x": Options((1, 2, 3))})
    assert len(numbers(space, "grid_search", 9)) == 3
    with pytest.warns(UserWarning, match="nb_trials=9, but the lists have 3 combinations"):
        assert len(numbers(space, "random_search", 9)) == 3
    assert len(numbers(Space({"x": Range(0.0, 1.0)}), "random_search", 99)) == 99
    with pytest.raises(MisconfigurationException, match="needs nb_trials"):
        numbers(space, "random_search", None)


def test_optuna_ran_no_more_trials_than_lists_have_combinations() -> None:
    assert list(numbers(Space({"x": Options((1, 2, 3))}), "optuna", 7)) == list(range(7))


def test_a_type_that_takes_text_gets_text() -> None:
    assert convert("--x", True, lambda text: text.lower() == "true") is True
    assert convert("--x", None, int) is None
