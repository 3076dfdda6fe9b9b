"""Nested batches: map and leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ground.tree import tree_leaves, tree_map

Point = namedtuple("Point", "x y")

nested = st.recursive(
    st.integers() | st.text() | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.builds(Point, inner, inner)
    ),
    max_leaves=20,
)


@given(nested)
def test_mapping_the_identity_gives_an_equal_tree_of_the_same_types(tree: Any) -> None:
    mapped = tree_map(lambda leaf: leaf, tree, (int, float))
    assert mapped == tree
    assert repr(mapped) == repr(tree)


@given(nested)
def test_leaves_come_in_the_order_of_the_map(tree: Any) -> None:
    met: list[Any] = []
    tree_map(met.append, tree, int)
    assert list(tree_leaves(tree, int)) == met


def test_containers_keep_their_types_and_what_belongs_to_them() -> None:
    counts: defaultdict[str, Any] = defaultdict(list, a=1)
    mapped = tree_map(str, {"counts": counts, "ordered": OrderedDict(b=2), "user": UserDict(c=3)}, int)
    assert mapped["counts"] == {"a": "1"}
    assert mapped["counts"]["missing"] == []
    assert mapped["ordered"] == OrderedDict(b="2")
    assert type(mapped["ordered"]) is OrderedDict
    assert isinstance(mapped["user"], UserDict)
    assert mapped["user"]["c"] == "3"
    assert counts == {"a": 1}


@dataclass
class Sample:
    image: int
    label: str
    late: int = field(init=False)

    @cached_property
    def doubled(self) -> int:
        return 2 * self.image


@dataclass(frozen=True)
class FrozenSample:
    image: int


@dataclass(frozen=True, slots=True)
class SlottedSample:
    image: int


def test_dataclass_with_a_field_that_is_not_set_yet() -> None:
    sample = Sample(1, "one")
    mapped = tree_map(lambda n: n + 1, sample, int)
    assert (mapped.image, mapped.label, sample.image) == (2, "one", 1)
    assert not hasattr(mapped, "late")
    assert list(tree_leaves(sample, int)) == [1]


def test_a_cached_property_is_computed_anew() -> None:
    sample = Sample(1, "one")
    assert sample.doubled == 2
    assert tree_map(lambda n: n + 1, sample, int).doubled == 4
    assert sample.doubled == 2


@pytest.mark.parametrize("kind", [FrozenSample, SlottedSample])
def test_frozen_dataclasses_are_mapped_too(kind: Any) -> None:
    sample = kind(1)
    assert tree_map(lambda n: n + 1, [sample], int) == [kind(2)]
    assert sample.image == 1
