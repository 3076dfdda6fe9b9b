"""Errors in the callbacks of a communication hook's futures are the first cause, told with the line that raised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.strategies import DDPStrategy
from lockstep.testing.pool import RankFailure, RankPool
from tests.loop.pieces import Slope, numbers, quiet


def then(state: Any, bucket: Any) -> Any:
    def finish(future: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        return future.value()[0]

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finish)


def completing_another(state: Any, bucket: Any) -> Any:
    made: Any = torch.futures.Future()

    def finish(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        made.set_result(future.value()[0])

    dist.all_reduce(bucket.buffer(), async_op=True).get_future().add_done_callback(finish)
    return made


def beside(state: Any, bucket: Any) -> Any:
    def look(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")

    found = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    found.add_done_callback(look)
    return found


def in_a_callback(state: Any, bucket: Any) -> Any:
    made: Any = torch.futures.Future()

    def second(future: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the callback failed")
        made.set_result(bucket.buffer())

    def first(future: Any) -> None:
        further: Any = torch.futures.Future()
        further.add_done_callback(second)
        further.set_result(None)

    dist.all_reduce(bucket.buffer(), async_op=True).get_future().add_done_callback(first)
    return made


@pytest.mark.parametrize("hook", [then, completing_another, beside, in_a_callback])
def test_an_error_in_a_callback_is_the_first_cause(ranks: RankPool, hook: Any) -> None:
    """Torch printed it and went on, or never ended the future: the rank hung, and another one was blamed."""

    def fit() -> None:
        quiet(strategy=DDPStrategy(ddp_comm_hook=hook), devices=2, max_epochs=3).fit(Slope(), numbers(16))

    with pytest.raises(RankFailure, match="failed on rank 1 of 2: ValueError: the callback failed") as caught:
        ranks(2).run(fit, timeout=20)
    assert 'raise ValueError("the callback failed")' in caught.value.stack


def test_callbacks_of_others_are_left_alone(ranks: RankPool) -> None:
    def fit() -> list[str]:
        quiet(strategy=DDPStrategy(ddp_comm_hook=beside), devices=1, max_epochs=1).fit(Slope(), numbers(2))
        made: Any = torch.futures.Future()
        made.add_done_callback(lambda future: found.append("done"))
        made.then(lambda future: found.append("then"))
        made.set_result(1)
        return found

    found: list[str] = []
    assert ranks(1).run(fit) == [["done", "then"]]
