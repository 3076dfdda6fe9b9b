"""A bucket on a GPU, as far as it shows without one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.engines.ddp.bucket import ALIGNMENT, Bucket, ParameterInfo, fit_plan, offsets, plan_buckets
from lockstep.engines.ddp.reducer import Reducer
from lockstep.ground import transfer
from tests.tools.pool import RankPool

# -- a bucket on a gpu, as far as it shows without one -------------------------------------------------------


def test_marks_go_to_a_gpu_from_pinned_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read from memory that the next round writes, and that is not pinned: early or late, or after a wait."""
    copied: list[tuple[Tensor, bool]] = []
    copy = Tensor.copy_

    def watched(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied.append((source, non_blocking))
        return copy(self, source, non_blocking)

    bucket = Bucket(0, ["a", "b"], [Parameter(torch.ones(2)), Parameter(torch.ones(3))], True, 16)
    bucket.lay_out(torch.zeros(bucket.size[0]))
    bucket.arm(True, False)
    bucket.parameters[0].grad = torch.ones(2)
    bucket.device = torch.device("cuda", 0)
    monkeypatch.setattr(transfer, "has_pinned_memory", lambda kind: True)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(Tensor, "copy_", watched)
    bucket.collect(True, 0.5)
    (source, at_once) = copied[-1]
    bucket.used[:] = bytes(2)
    assert (source.tolist(), at_once) == ([1, 0], True)


# -- bucket plans --------------------------------------------------------------------------------------------


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
    plan = plan_buckets(infos, [first, cap])
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
    plan = plan_buckets(infos, [first, cap])
    assert fit_plan(plan, infos, [other]) == plan


@given(parameters, sizes, st.randoms())
def test_a_plan_is_restored_when_a_parameter_thaws(infos: list[ParameterInfo], cap: int, chance) -> None:
    plan = plan_buckets(infos, [cap])
    awake = [info for info in infos if chance.random() < 0.5]
    names = {info.name for info in awake}
    fitted = fit_plan(plan, awake, [cap], frozen=[info.name for info in infos])
    kept = [[name for name in bucket if name in names] for bucket in plan]
    assert fitted == [bucket for bucket in kept if bucket]
    for bucket in fit_plan(fitted, infos, [cap])[: len(fitted)]:
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
        fit_plan([["a"], ["c"]], infos, [10])
    with pytest.raises(ValueError, match="contains parameter 'a' twice"):
        fit_plan([["a"], ["a"]], infos, [10])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] in one bucket, but they have several dtypes"):
        fit_plan([["a", "b"]], infos, [10])


# -- the bucket layout ---------------------------------------------------------------------------------------


def _remade(plan: list[list[str]] | None) -> tuple[list[list[list[str]]], list[Tensor]]:
    """Layers are called in another order than they are registered in, and rank 1 does without one."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abcd"}).double()
    reducer = Reducer(
        net.named_parameters(), bucket_cap_mb=0.0002, first_bucket_mb=0.0002, plan=plan, shared_memory=False
    )
    plans, grads = [reducer.plan()], []
    for step in range(3):
        net.zero_grad()
        hidden = torch.full((1, 4), 1.0 + step + dist.get_rank(), dtype=torch.float64)
        for name in "cadb" if dist.get_rank() == 0 else "bda":
            hidden = net[name](hidden).tanh()
        reducer.prepare()
        hidden.sum().backward()
        reducer.finish()
        plans.append(reducer.plan())
        grads += [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
    return plans, grads


def test_buckets_are_laid_out_anew_once_in_the_order_of_rank_0(ranks: RankPool) -> None:
    results = ranks(2).run(_remade, None)
    for plans, grads in results:
        assert plans[0] == [["d.weight"], ["c.weight"], ["b.weight"], ["a.weight"]]
        assert plans[1] == [["b.weight"], ["d.weight"], ["a.weight"], ["c.weight"]]
        assert plans[2] == plans[3] == plans[1]
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][1], strict=True))


def test_a_given_layout_is_kept(ranks: RankPool) -> None:
    given = [["a.weight"], ["d.weight", "b.weight"], ["c.weight"]]
    free = ranks(2).run(_remade, None)[0][1]
    for plans, grads in ranks(2).run(_remade, given):
        assert plans == [given] * 4
        assert all(torch.equal(a, b) for a, b in zip(grads, free, strict=True))
