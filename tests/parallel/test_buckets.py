"""Bucket plans: what every plan must have, and restoring one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.bucket import ALIGNMENT, ParameterInfo, fit_plan, offsets, plan_buckets

CPU = torch.device("cpu")
parameters = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from([CPU, torch.device("meta")]),
    ),
    max_size=30,
).map(lambda kinds: [ParameterInfo(f"p{i}", *kind) for i, kind in enumerate(kinds)])
sizes = st.integers(1, 400)


@given(parameters, sizes, sizes)
def test_a_plan_holds_each_parameter_once_in_buckets_that_fit(infos: list[ParameterInfo], cap: int, first: int) -> None:
    plan = plan_buckets(infos, cap, first)
    by_name = {info.name: info for info in infos}
    position = {info.name: index for index, info in enumerate(infos)}
    assert sorted(name for bucket in plan for name in bucket) == sorted(by_name)
    seen_first = {}
    for bucket in plan:
        assert len({(by_name[name].dtype, by_name[name].device) for name in bucket}) == 1
        places = [position[name] for name in bucket]
        assert places == sorted(places, reverse=True)
        info = by_name[bucket[-1]]
        seen_first[info.dtype, info.device] = bucket
        assert len(bucket) == 1 or sum(by_name[name].nbytes for name in bucket) <= max(cap, first)
    for bucket in seen_first.values():  # the last one of each kind
        assert len(bucket) == 1 or sum(by_name[name].nbytes for name in bucket) <= first
    ends = [position[bucket[-1]] for bucket in plan]
    assert ends == sorted(ends, reverse=True)


@given(parameters, sizes, sizes, sizes)
def test_a_plan_fits_the_parameters_that_it_was_made_for(
    infos: list[ParameterInfo], cap: int, first: int, other: int
) -> None:
    plan = plan_buckets(infos, cap, first)
    assert fit_plan(plan, infos, other, other) == plan


@given(parameters, sizes, st.randoms())
def test_a_plan_is_restored_when_a_parameter_thaws(infos: list[ParameterInfo], cap: int, chance) -> None:
    plan = plan_buckets(infos, cap, cap)
    awake = [info for info in infos if chance.random() < 0.5]
    names = {info.name for info in awake}
    fitted = fit_plan(plan, awake, cap, cap, frozen=[info.name for info in infos])
    kept = [[name for name in bucket if name in names] for bucket in plan]
    assert fitted == [bucket for bucket in kept if bucket]
    for bucket in fit_plan(fitted, infos, cap, cap)[: len(fitted)]:
        assert bucket in fitted


@given(st.lists(st.integers(0, 40), min_size=1), st.sampled_from([1, 2, 4, 8, 16]))
def test_gradients_lie_apart_and_aligned(numels: list[int], itemsize: int) -> None:
    starts, end = offsets(numels, itemsize)
    for start, numel, following in zip(starts, numels, [*starts[1:], end], strict=True):
        assert start * itemsize % ALIGNMENT == 0
        assert numel <= following - start < numel + ALIGNMENT


def test_errors_name_the_parameter() -> None:
    infos = [ParameterInfo("a", 1, torch.float32, CPU), ParameterInfo("b", 1, torch.float64, CPU)]
    with pytest.raises(ValueError, match="no parameter 'c'"):
        fit_plan([["a"], ["c"]], infos, 10, 10)
    with pytest.raises(ValueError, match="'a' is in it twice"):
        fit_plan([["a"], ["a"]], infos, 10, 10)
    with pytest.raises(ValueError, match=r"\['a', 'b'\] have several dtypes"):
        fit_plan([["a", "b"]], infos, 10, 10)
