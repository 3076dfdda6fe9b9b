"""The message of who has used which parameters."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lockstep.engines.ddp.transport import UsedParameters
from tests.tools.pool import RankPool

# -- the message of used flags ------------------------------------------------------------------------------------


class Used:
    """As much of a bucket as the message looks at."""

    def __init__(self, *used: int) -> None:
        self.used = bytearray(used)
        self.names = [f"{len(used)}.{index}" for index in range(len(used))]


def _heard(used: list[list[list[int]]], willing: list[bool]) -> tuple[list[list[int]], bool]:
    rank = dist.get_rank()
    message = UsedParameters([Used(*marks) for marks in used[rank]], willing[rank], None)  # type: ignore[misc]
    assert message.nbytes == 1 + sum(map(len, used[rank]))
    parts, agreed = message.wait()
    return [[int(mark != 0) for mark in part or ()] for part in parts], agreed


def test_each_rank_hears_who_used_what(ranks: RankPool) -> None:
    used = [[[1, 1], [1]], [[0, 1], [0]], [[1, 0], [0]]]
    assert ranks(3).run(_heard, used, [False, True, False]) == [([[1, 1], [1]], False)] * 3
    used[0] = [[0, 1], [0]]
    assert ranks(3).run(_heard, used, [True] * 3) == [([[1, 1], [0]], True)] * 3


def test_who_used_everything_does_not_look() -> None:
    """Looking is waiting: a GPU would come to an end with its backward in every round of a communication hook."""
    everything: Any = UsedParameters([Used(1, 1), Used(1)], False, None)  # type: ignore[list-item]
    everything._flags = None
    assert everything.wait() == ([b"\1\1", b"\1"], False)
    for used, willing in (((1, 1), True), ((1, 0), False)):
        looks: Any = UsedParameters([Used(*used)], willing, None)  # type: ignore[list-item]
        assert looks.wait() == ([list(used)], willing)
