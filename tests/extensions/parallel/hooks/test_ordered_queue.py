"""Lanes: order, errors, what they leave behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.parallel.hooks import hook_transport as queue_file
from lockstep.extensions.parallel.hooks.hook_transport import THREAD, ThreadQueue, end_threads, open_queue, submit
from lockstep.ground import comm
from tests.tools.pool import RankPool

CPU = torch.device("cpu")


def _failing() -> tuple[str, float]:
    def fail(group: comm.Group) -> Tensor:
        raise ArithmeticError("no such sum")

    def total(group: comm.Group) -> Tensor:
        value = torch.ones(1)
        if comm.world_size(group) > 1:
            dist.all_reduce(value, group=group)
        return value

    bad, good = submit(None, CPU, fail), submit(None, CPU, total)
    with pytest.raises(ArithmeticError, match="no such sum"):
        bad.wait()
    return "fine", good.wait().item()


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_reaches_who_waits_and_leaves_the_lane_usable(ranks: RankPool, world: int) -> None:
    assert ranks(world).run(_failing) == [("fine", float(world))] * world


def _two_messages_each() -> list[float]:
    """Jobs that send a second message after the first has arrived, while this thread sends some as well."""

    def job(number: int, group: comm.Group) -> Tensor:
        first = torch.full((number + 1,), float(number))
        dist.all_reduce(first, group=group)
        time.sleep(0.002 * dist.get_rank())
        second = first[:1] * 10
        dist.all_reduce(second, group=group)
        return second

    futures = []
    for number in range(20):
        futures.append(submit(None, CPU, lambda group, number=number: job(number, group)))
        mine = torch.tensor([1.0, 2.0, 3.0])
        dist.all_reduce(mine)
        assert mine.tolist() == [2.0, 4.0, 6.0]
    found = [future.wait().item() for future in futures]
    for _ in range(200):  # the thread ends when there is nothing to do
        if all(thread.name != THREAD for thread in threading.enumerate()):
            return found
        time.sleep(0.01)
    raise AssertionError("the queue's thread is still there")


def test_jobs_of_several_messages_run_in_order_beside_other_messages(ranks: RankPool) -> None:
    assert ranks(2).run(_two_messages_each) == [[40.0 * number for number in range(20)]] * 2


def _one_for_each() -> tuple[bool, bool, bool]:
    whole = open_queue(None, CPU)
    half = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        part = open_queue(half, CPU)
        return whole is open_queue(dist.group.WORLD, CPU), part is open_queue(half, CPU), part is not whole
    return True, True, True


def test_each_group_has_one_queue(ranks: RankPool) -> None:
    assert ranks(3).run(_one_for_each) == [(True, True, True)] * 3


def test_the_interpreter_does_not_end_before_a_queues_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process in ten was aborted at its end: its last job's thread still ran when the interpreter was gone."""
    queue, go_on = ThreadQueue(None), threading.Event()
    future = queue.submit(None, CPU, lambda _: torch.ones(1) if go_on.wait(5) else torch.zeros(1))
    monkeypatch.setattr(queue_file, "PATIENCE", 0.01)
    end_threads()
    assert not future.done()  # it is not waited for longer
    monkeypatch.undo()
    threading.Timer(0.1, go_on.set).start()
    end_threads()
    assert future.done()
    assert THREAD not in [thread.name for thread in threading.enumerate()]
