"""The host goes on while the device works, waits where it needs a value, and each wait is counted."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lockstep.precision.base import LossScaler
from tests.accelerator.on_device import on_device
from tests.tools.pool import RankPool


@on_device()
def test_operators_return_when_they_are_queued() -> None:
    from tests.accelerator.madeup import kernels, queues

    values = torch.arange(6.0, device="madeup")
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh()).to("madeup")
    optimizer = torch.optim.AdamW(net.parameters())
    expected = net(values.expand(3, 6)).detach().sum().item()
    go_on = queues.block()
    with queues.watched_waits() as waits:
        made = (values * 2 + 1).sum()
        loss = net(values.expand(3, 6)).sum()
        loss.backward()
        optimizer.step()
    assert not waits
    assert not kernels.without_shapes
    assert not torch.get_device_module("madeup").current_stream().query()
    go_on()
    assert made.item() == 36.0
    assert loss.item() == expected


@on_device()
def test_the_host_waits_where_it_needs_a_value_and_says_where() -> None:
    from tests.accelerator.madeup import queues

    mask = torch.tensor([True, False]).to("madeup", non_blocking=True)
    waiting = {
        "_local_scalar_dense": lambda: mask[0].item(),
        "copy to the cpu": lambda: mask.cpu(),
        "copy to the device": lambda: torch.ones(1).to("madeup"),
        "nonzero": lambda: mask.nonzero(),
        "equal": lambda: torch.equal(mask, mask),
        "synchronize": lambda: torch.accelerator.synchronize(),
        "stream.synchronize": lambda: torch.accelerator.current_stream().synchronize(),
    }
    for why, ask in waiting.items():
        begun = time.monotonic()
        queues.sleep(0.1)  # longer than a busy machine leaves this process asleep
        with queues.watched_waits() as waits:
            ask()
        assert time.monotonic() - begun >= 0.1, why
        assert [each[0] for each in waits] == [why]
        assert "test_queues.py:" in waits[0][1]
    with queues.watched_waits() as waits:
        torch.zeros(2, device="madeup").fill_(3).add_(1)
        torch.ones(1).to("madeup", non_blocking=True)
        torch.ones(2, device="madeup:1").to("madeup:0")
    assert not waits


@on_device()
def test_pinned_memory_is_read_and_written_when_the_device_comes_to_it() -> None:
    from tests.accelerator.madeup import queues

    plain, pinned = torch.ones(1), torch.ones(1).pin_memory()
    there, back = torch.full((1,), 5.0, device="madeup"), torch.zeros(1, pin_memory=True)
    assert (plain.is_pinned(), pinned.is_pinned(), back.is_pinned()) == (False, True, True)
    go_on = queues.block()
    with queues.watched_waits() as waits:
        of_plain = plain.to("madeup", non_blocking=True)
        of_pinned = pinned.to("madeup", non_blocking=True)
        back.copy_(there, non_blocking=True)
    assert not waits
    plain.fill_(2)
    pinned.fill_(2)
    assert back.item() == 0.0
    go_on()
    torch.accelerator.synchronize()
    assert (of_plain.item(), of_pinned.item(), back.item()) == (1.0, 2.0, 5.0)


@on_device()
def test_streams_know_nothing_of_each_other_unless_they_wait_for_an_event() -> None:
    from tests.accelerator.madeup import queues

    module = torch.get_device_module("madeup")
    values = torch.zeros(1, device="madeup")
    beside, main = module.Stream(), module.current_stream()
    with module.stream(beside):
        assert module.current_stream() is beside
        go_on = queues.block()
        values.add_(1)
        event = beside.record_event()
    assert module.current_stream() is main
    too_early = values + 10  # a race, as it is with CUDA
    assert too_early.item() == 10.0
    assert not event.query()
    main.wait_event(event)
    right = values + 10
    assert not main.query()
    go_on()
    assert right.item() == 11.0
    assert event.query()
    assert beside.query()


@on_device()
def test_a_copy_between_devices_is_in_the_order_of_both() -> None:
    from tests.accelerator.madeup import queues

    source, to = torch.zeros(1, device="madeup:0"), torch.zeros(1, device="madeup:1")
    go_on, go_on_there = queues.block(0), queues.block(1)
    source.add_(1)
    to.copy_(source)
    source.add_(5)
    to.mul_(2)
    go_on()
    go_on_there()
    assert (to.item(), source.item()) == (2.0, 6.0)


@on_device()
def test_what_fails_in_a_queue_is_told_where_the_host_waits() -> None:
    from tests.accelerator.madeup import queues

    values = torch.zeros(2, device="madeup:3")
    go_on = queues.block(3)
    values.index_select(0, torch.tensor([5]).to("madeup:3", non_blocking=True))  # torch's shapes do not show it
    go_on()
    with pytest.raises(RuntimeError, match="queued work has failed: IndexError"):
        values.sum().item()
    queues.default_stream(3).lane.error = None  # the rank goes on to other tests


@pytest.mark.parametrize("factor", [1.0, torch.inf])
def test_gradients_on_the_cpu_are_divided_by_a_scale_that_is_there(madeup: RankPool, factor: float) -> None:
    """A rank of `fsdp_cpu_offload` took an infinite gradient for a finite one, stepped, and left the others waiting."""

    def unscaled() -> tuple[list[float], bool]:
        from tests.accelerator.madeup import queues

        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], 0.1)
        scaler = LossScaler("madeup", init_scale=4.0)
        scaler.scale(torch.ones((), device="madeup"))
        go_on = queues.block()
        threading.Timer(0.3, go_on).start()
        parameter.grad = torch.full((3,), 8.0 * factor)
        scaler.unscale(optimizer)
        torch.accelerator.synchronize()
        return parameter.grad.tolist(), scaler.must_skip(optimizer)

    ((gradient, left_out),) = madeup(1).run(unscaled, group=False)
    assert gradient == [2.0 * factor] * 3
    assert left_out == (factor == torch.inf)
