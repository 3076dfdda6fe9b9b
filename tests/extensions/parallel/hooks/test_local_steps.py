"""Post-local SGD's hook, lockstep's and torch's: who averages with whom, and over whom marks are agreed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.parallel.hooks import (
    PostLocalSGDState,
    fp16_wrapper,
    local_sgd,
    marks_of,
    post_local_sgd,
    prepare_state,
)
from lockstep.extensions.parallel.hooks.local_sgd import group_of, node_group
from lockstep.ground.errors import MisconfigurationException
from tests.extensions.parallel.hooks.pieces import Model, as_checkpoint, counted, play
from tests.tools.pool import RankPool

CUT = [[(3, 2)], [(4,)]]


def _state(kind: str, start: int, subgroup: Any, together: bool = True) -> tuple[Any, Any]:
    if kind == "ours":
        return post_local_sgd, PostLocalSGDState(start, subgroup, local_allreduce=together)
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs

    return torchs.post_localSGD_hook, torchs.PostLocalSGDState(None, subgroup, start, together)


def _mean(ranks: range, step: int) -> Tensor:
    buckets = [Model(CUT).buckets(rank, step) for rank in ranks]
    return torch.stack([torch.cat([bucket.buffer() for bucket in one]) for one in buckets]).mean(dim=0)


def _played(kind: str, together: bool) -> list[list[str]]:
    rank = dist.get_rank()
    first = rank // 2 * 2
    hook, state = _state(kind, 2, group_of([first, first + 1]) if together else None, together)
    marks = marks_of(fp16_wrapper(hook), state)
    assert marks is not None
    calls = []
    model = Model(CUT)
    for step in range(4):
        agreed = marks()
        assert agreed is (None if step < 2 else state.subgroup if together else False)
        with counted() as wire:
            found = torch.cat(play(hook, state, model.buckets(rank, step)))
        calls.append(wire.calls)
        who = (
            range(dist.get_world_size()) if step < 2 else range(first, first + 2) if together else range(rank, rank + 1)
        )
        torch.testing.assert_close(found, _mean(who, step))
    return calls


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_all_ranks_average_and_then_those_of_a_group(ranks: RankPool, kind: str) -> None:
    for calls in ranks(4).run(_played, kind, True):
        assert calls == [["all_reduce"] * 2] * 4
    for calls in ranks(2).run(_played, kind, False):
        assert calls == [["all_reduce"] * 2] * 2 + [[]] * 2


def _made(kind: str, hosts: list[str]) -> tuple[list[int], bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_sgd, "this_node", lambda: (hosts[dist.get_rank()], "", ""))
        hook, state = _state(kind, 0, None)
        assert prepare_state(state, None, hook) is state
    marks = marks_of(hook, state)
    assert marks is not None
    play(hook, state, Model(CUT).buckets(dist.get_rank(), 0))
    return dist.get_process_group_ranks(state.subgroup), marks() is False


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_without_a_subgroup_there_is_one_for_each_node(ranks: RankPool, kind: str) -> None:
    """torch's own way to make it needs GPUs: PostLocalSGDState(subgroup=None) raised at its start iteration."""
    found = ranks(4).run(_made, kind, ["a", "b", "a", "c"])
    assert found == [([0, 2], False), ([1], True), ([0, 2], False), ([3], True)]


def _first_call_prepares() -> int:
    state = PostLocalSGDState(0)
    play(post_local_sgd, state, Model(CUT).buckets(dist.get_rank(), 0))
    assert pickle.loads(pickle.dumps(state)).subgroup is None
    return dist.get_world_size(state.subgroup)


def test_the_first_call_makes_the_subgroup_too(ranks: RankPool) -> None:
    assert ranks(2).run(_first_call_prepares) == [2, 2]


def _node_group_of_a_part() -> list[int]:
    if dist.get_rank() == 0:
        return []
    half = dist.new_group([1, 2], use_local_synchronization=True)
    return dist.get_process_group_ranks(node_group(half))


def test_a_part_of_the_ranks_makes_its_node_groups_by_itself(ranks: RankPool) -> None:
    assert ranks(3).run(_node_group_of_a_part) == [[], [1, 2], [1, 2]]


def test_progress_is_saved() -> None:
    state, other = PostLocalSGDState(3), PostLocalSGDState(3)
    play(post_local_sgd, state, Model(CUT).buckets(0, 0))
    other.load_state_dict(as_checkpoint(state.state_dict()))
    assert (state.iteration, other.iteration, other.start_localSGD_iter) == (1, 1, 3)


def test_other_hooks_have_no_marks_of_their_own() -> None:
    assert marks_of(print, None) is None


@pytest.mark.parametrize("start", [-1, 2.5, None])
def test_a_start_is_a_number_of_rounds(start: Any) -> None:
    with pytest.raises(MisconfigurationException, match=f"start={start}"):
        PostLocalSGDState(start)


CARD = torch.device("cuda", 0)


def _in_part() -> Any:
    """A group of two of three ranks, made beside a default group that is bound to a device."""
    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    default: Any = dist.group.WORLD
    made, seen = dist.new_group, []
    default.bound_device_id = CARD
    dist.new_group = lambda *args, **given: seen.append(default.bound_device_id) or made(*args, **given)
    try:
        if dist.get_rank() < 2:
            group_of([0, 1], parts[0])
        return seen, default.bound_device_id
    finally:
        dist.new_group, default.bound_device_id = made, None


def test_a_group_of_some_ranks_connects_without_the_others(ranks: RankPool) -> None:
    """Beside a bound default group torch splits that one's communicator, which all of its ranks must call: it hung."""
    assert ranks(3).run(_in_part) == [([None], CARD), ([None], CARD), ([], CARD)]
