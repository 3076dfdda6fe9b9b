"""The made-up device does what the CPU does, keeps devices apart from each other, and lacks what it is told to."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.on_device import on_device


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Flatten(), nn.Linear(72, 3)
    ).double()


def _trained(net: nn.Module, device: str) -> list[Tensor]:
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    images = torch.linspace(-1, 1, 4 * 2 * 36, dtype=torch.float64).view(4, 2, 6, 6).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), torch.arange(4, device=device) % 3).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [each.detach().cpu() for each in net.state_dict().values()]


@on_device()
def test_a_net_learns_what_it_learns_on_the_cpu() -> None:
    net = _net()
    for found, expected in zip(_trained(copy.deepcopy(net), "madeup:1"), _trained(net, "cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@on_device()
def test_a_net_learns_the_same_when_every_operator_is_queued() -> None:
    from tests.accelerator.madeup import having

    net = _net()
    expected = _trained(copy.deepcopy(net), "madeup")
    with having(queued=1):
        found = _trained(net, "madeup")
    assert all(map(torch.equal, found, expected))


@on_device()
def test_devices_do_not_mix() -> None:
    here = torch.ones(2, device="madeup:0")
    for other in (torch.ones(2), torch.ones(2, device="madeup:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2.0, 2.0]  # a number in a tensor, as CUDA takes it
    with pytest.raises(RuntimeError, match="there are 4"):
        torch.ones(2, device="madeup:4")


@on_device()
def test_a_module_that_moves_keeps_its_parameters() -> None:
    net = nn.Linear(2, 2)
    weight = net.weight
    assert net.to("madeup:1").weight is weight
    assert weight.device.index == 1
    assert weight.requires_grad
    weight.sum().backward()
    assert net.cpu().weight is weight
    assert weight.grad is not None
    assert weight.grad.device.type == "cpu"


# -- random numbers


def _drawn(device: str) -> list[float]:
    return [*torch.randn(2, device=device).tolist(), torch.rand(1, device=device).item()]


@on_device()
def test_each_device_has_random_numbers_of_its_own() -> None:
    from tests.accelerator.madeup import numbers

    assert numbers.Generator().seed != numbers.Generator().seed  # at random, as CUDA's
    torch.manual_seed(3)
    first = _drawn("madeup:0")
    assert first == _drawn("madeup:1")
    assert first != _drawn("madeup:0")
    states = torch.get_device_module("madeup").get_rng_state(1)
    again = _drawn("madeup:1")
    torch.get_device_module("madeup").set_rng_state(states, 2)
    assert _drawn("madeup:2") == again
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(4, device="madeup"))
    assert torch.equal(before, torch.get_rng_state())  # the CPU's are the CPU's


@on_device()
def test_random_numbers_are_those_of_the_order_of_calls() -> None:
    from tests.accelerator.madeup import queues

    def draw() -> list[Tensor]:
        values = torch.ones(8, device="madeup", requires_grad=True)
        kept = nn.functional.dropout(values, 0.5)
        kept.sum().backward()
        assert values.grad is not None
        return [kept, values.grad, torch.randperm(5, device="madeup"), torch.empty(2, device="madeup").normal_()]

    torch.manual_seed(0)
    expected = [each.tolist() for each in draw()]
    torch.manual_seed(0)
    go_on = queues.block()
    found = draw()
    state = torch.get_device_module("madeup").get_rng_state()
    go_on()
    assert [each.tolist() for each in found] == expected
    assert torch.equal(state, torch.get_device_module("madeup").get_rng_state())
    assert set(expected[0]) == {0.0, 2.0}
    assert expected[0] == expected[1]


# -- what it has and has not


@on_device()
def test_a_device_without_float64_refuses_it() -> None:
    from tests.accelerator.madeup import having

    with having(float64=0):
        for make in (
            lambda: torch.ones(1, dtype=torch.float64).to("madeup"),
            lambda: torch.ones(1, dtype=torch.float64, device="madeup"),
            lambda: torch.ones(1, device="madeup").double(),
            lambda: nn.Linear(1, 1).double().to("madeup"),
        ):
            with pytest.raises(TypeError, match="madeup does not have it"):
                make()
        assert torch.ones(1, device="madeup").sum().item() == 1.0


@on_device()
def test_a_fork_of_a_process_that_has_used_the_device_cannot() -> None:
    module = torch.get_device_module("madeup")
    torch.ones(1, device="madeup")
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.ones(1, device="madeup")
        except RuntimeError as error:
            status = 0 if "in forked subprocess" in str(error) and module._is_in_bad_fork() else 2
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert not module._is_in_bad_fork()
