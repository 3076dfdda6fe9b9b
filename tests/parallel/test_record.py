"""Hooks of a module on several devices, which autograd calls from several threads at once."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch.nn.parameter import Parameter

from lockstep.parallel.bucket import Bucket
from lockstep.parallel.reducer import Reducer, lock_of
from lockstep.parallel.transport import AllReduce


class Slow(AllReduce):
    """Takes its time before it sends the first bucket."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sent: list[int] = []
        self.begun = threading.Event()
        self.patience = 0.0

    def start(self, bucket: Bucket, scale: float) -> None:
        self.begun.set()
        patience, self.patience = self.patience, 0.0
        time.sleep(patience)
        self.sent.append(bucket.index)

    def wait(self, bucket: Bucket) -> None:
        pass


@pytest.mark.parametrize("static", [False, True])
def test_threads_of_several_devices_send_buckets_in_order(static: bool) -> None:
    """A second thread sent its bucket while the first was about to: NCCL would have waited for ever on some rank."""
    carrier = Slow()
    wide = Parameter(torch.ones(3, dtype=torch.float64))
    named = {"there": Parameter(torch.ones(3, device="meta")), "here": Parameter(torch.ones(3)), "wide": wide}
    reducer = Reducer(named.items(), transport=carrier, static_graph=static)
    for _ in range(3):
        reducer.prepare()
        torch.autograd.backward([parameter.sum() for parameter in named.values()])
        reducer.finish()
    first, second, third = [named[name] for (name,) in reducer.plan()]
    carrier.sent.clear()
    carrier.begun.clear()
    carrier.patience = 0.1
    reducer.prepare()
    thread = threading.Thread(target=lambda: first.sum().backward())
    thread.start()
    assert carrier.begun.wait(5)
    second.sum().backward()
    thread.join()
    third.sum().backward()
    reducer.finish()
    assert carrier.sent == [0, 1, 2]
    reducer.detach()


def test_one_device_has_nothing_to_wait_for() -> None:
    assert isinstance(lock_of([torch.ones(1), torch.ones(2)]), nullcontext)
