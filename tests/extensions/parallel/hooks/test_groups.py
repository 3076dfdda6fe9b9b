"""Groups of some ranks, made for hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.tools.pool import RankPool

CUDA = torch.device("cuda", 0)


# -- groups that carry a device's tensors alone, and groups that carry the host's, too


def _in_part() -> Any:
    """A group of two of three ranks, made beside a default group that is bound to a device."""
    from lockstep.engines.ddp.hooks import local_sgd

    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    default: Any = dist.group.WORLD
    made, seen = dist.new_group, []
    default.bound_device_id = CUDA
    dist.new_group = lambda *args, **given: seen.append(default.bound_device_id) or made(*args, **given)
    try:
        if dist.get_rank() < 2:
            local_sgd.group_of([0, 1], parts[0])
        return seen, default.bound_device_id
    finally:
        dist.new_group, default.bound_device_id = made, None


def test_a_group_of_some_ranks_connects_without_the_others(ranks: RankPool) -> None:
    """Beside a bound default group torch splits that one's communicator, which all of its ranks must call: it hung."""
    assert ranks(3).run(_in_part) == [([None], CUDA), ([None], CUDA), ([], CUDA)]
