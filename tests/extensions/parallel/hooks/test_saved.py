"""Hook states as plain data: torch's, ours, users' own; resumed bitwise; shared out to other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

from lockstep.extensions.parallel.hooks import PowerSGDState, load_state, power_sgd, save_state
from lockstep.extensions.parallel.hooks.error_feedback import share_states
from lockstep.extensions.parallel.hooks.hook_transport import in_order
from tests.extensions.parallel.hooks.pieces import Model, as_checkpoint, play, same_on_all
from tests.tools.pool import RankPool

CUT = [[(30, 20), (4,)], [(16, 3, 5)]]


def _resumed(warm: bool, wrapped: bool) -> tuple[list[Tensor], list[Tensor]]:
    plain = powerSGD_hook.powerSGD_hook
    torchs = default_hooks.bf16_compress_wrapper(plain) if wrapped else plain
    hook = in_order(torchs)
    rank, whole, part, saved = dist.get_rank(), [], [], None

    def fresh() -> Any:
        return powerSGD_hook.PowerSGDState(None, 2, 2, warm_start=warm, orthogonalization_epsilon=1e-6)

    model, state = Model(CUT), fresh()
    for step in range(8):
        if step == 5:
            saved = as_checkpoint(save_state(state))
        whole += play(hook, state, model.buckets(rank, step))
    model, state, hook = Model(CUT), fresh(), in_order(torchs)
    load_state(state, saved)
    for step in range(5, 8):
        part += play(hook, state, model.buckets(rank, step))
    return whole[10:], part


@pytest.mark.parametrize(("warm", "wrapped"), [(True, False), (False, False), (True, True)])
def test_torchs_power_sgd_resumes_bitwise(ranks: RankPool, warm: bool, wrapped: bool) -> None:
    for whole, part in ranks(2).run(_resumed, warm, wrapped):
        assert len(whole) == 6
        assert same_on_all([whole, part])


def test_torchs_post_local_sgd_keeps_its_count() -> None:
    state = post_localSGD_hook.PostLocalSGDState(None, None, 4)
    state.iter = 3
    other = post_localSGD_hook.PostLocalSGDState(None, None, 4)
    load_state(other, as_checkpoint(save_state(state)))
    assert other.iter == 3


class Mine:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_users_states_by_their_own_methods_and_others_not_at_all() -> None:
    mine, other = Mine(), Mine()
    mine.count = 5
    load_state(other, save_state(mine))
    assert other.count == 5
    assert save_state(None) is None
    assert save_state(object()) is None
    load_state(object(), None)


def test_a_state_of_another_class_is_refused() -> None:
    saved = save_state(PowerSGDState())
    with pytest.raises(ValueError, match=r"\(None\) has no load_state_dict. Resume with the hook"):
        load_state(None, saved)
    with pytest.raises(ValueError, match=r"without 'iter'.*PostLocalSGDState"):
        load_state(post_localSGD_hook.PostLocalSGDState(None, None, 4), saved)


def _saved() -> Any:
    state, model = PowerSGDState(start=0), Model(CUT)
    for step in range(3):
        play(power_sgd, state, model.buckets(dist.get_rank(), step))
    return save_state(state)


def test_errors_are_shared_out_to_another_number_of_ranks(ranks: RankPool) -> None:
    saved = ranks(2).run(_saved)
    assert [one is two for one, two in zip(share_states(saved, 2), saved, strict=True)] == [True, True]
    shared = share_states(saved, 3)
    assert len(shared) == 3
    errors = [[record["error"] for record in of["memory"][0] if "error" in record] for of in [*saved, shared[2]]]
    assert errors[0]
    for first, second, now in zip(*errors, strict=True):
        assert not torch.equal(first, second)
        torch.testing.assert_close(now, (first + second) / 2)
    assert torch.equal(shared[0]["memory"][0][0]["q"], saved[0]["memory"][0][0]["q"])
    assert shared[0]["iteration"] == 3
    assert share_states([None, None], 3) == [None] * 3


def test_what_only_some_ranks_have_is_no_obstacle_to_another_number_of_them() -> None:
    """A user's own state may hold what it likes: this was a KeyError, and one of an index."""
    saved: list[dict[str, Any] | None] = [{"seen": [1, 2], "zero": (0,)}, {"seen": [3], "one": 1}]
    assert share_states(saved, 1) == [{"seen": [1, 2], "zero": (0,)}]
