"""Hooks on the reducer and the container: training with them, unused parameters, several buckets, resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep.engines.ddp.reducer import Reducer
from lockstep.extensions.parallel import hooks
from lockstep.extensions.parallel.averaging import OuterOptimizer, ParameterAverager
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook
from tests.extensions.parallel.hooks.pieces import as_checkpoint, same_on_all
from tests.tools.pool import RankPool

SMALL = 2000 / 2**20  # MiB: several buckets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 12, 3).to(memory_format=torch.channels_last)
        self.body = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh())
        self.seldom = nn.Linear(30, 30)
        self.head = nn.Linear(30, 3)

    def forward(self, x: Tensor, seldom: bool = False) -> Tensor:
        hidden = self.body(self.conv(x.to(memory_format=torch.channels_last)).amax((2, 3)))
        return self.head(self.seldom(hidden) if seldom else hidden)


def _loss(model: nn.Module, rank: int, step: int, seldom: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(8, 2, 5, 5, generator=generator)
    return nn.functional.cross_entropy(model(x, seldom), (x.sum((1, 2, 3)) > 0).long())


def _hooked(name: str) -> tuple[Any, Any]:
    torchs = powerSGD_hook.PowerSGDState(None, 30, 2, min_compression_rate=0.1, orthogonalization_epsilon=1e-7)
    ours = hooks.PowerSGDState(30, start=1, min_compression_rate=0.0)
    return {
        "allreduce": (None, hooks.allreduce),
        "fp16": (None, hooks.fp16),
        "bf16": (None, hooks.bf16),
        "power_sgd": (ours, hooks.power_sgd),
        "fp16 of power_sgd": (ours, hooks.fp16_wrapper(hooks.power_sgd)),
        "torch fp16": (None, default_hooks.fp16_compress_hook),
        "torch bf16": (None, default_hooks.bf16_compress_hook),
        "torch PowerSGD": (torchs, powerSGD_hook.powerSGD_hook),
        "torch fp16 of PowerSGD": (torchs, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
        "torch bf16 of ours": (None, default_hooks.bf16_compress_wrapper(hooks.fp16)),
    }[name]


LOOSE = {"allreduce": 1e-6, "power_sgd": 1e-3, "torch PowerSGD": 1e-3, "torch bf16 of ours": 0.1}
LOOSE["torch fp16 of PowerSGD"] = 0.1  # torch orthogonalizes and sums in float16
NAMES = ["allreduce", "fp16", "bf16", "power_sgd", "fp16 of power_sgd", "torch fp16", "torch bf16"]
NAMES += ["torch PowerSGD", "torch fp16 of PowerSGD", "torch bf16 of ours"]


def _trained(name: str) -> tuple[list[Tensor], int]:
    rank, net = dist.get_rank(), Net()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    model.register_comm_hook(*_hooked(name))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        _loss(model, rank, step, _seldom(name, rank, step)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()], len(model.reducer.plan())


def _seldom(name: str, rank: int, step: int) -> bool:
    """Now and then one rank uses a layer. torch's PowerSGD must not see it: a zero gradient of rank 1 stays zero."""
    return step % 2 == 1 and rank == 1 and "PowerSGD" not in name


def _alone(name: str) -> list[Tensor]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (_loss(net, rank, step, _seldom(name, rank, step)) / 2).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.everyday(5)
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_one_process_does(ranks: RankPool, name: str) -> None:
    (found, buckets), (again, _) = ranks(2).run(_trained, name)
    assert buckets > 2
    assert same_on_all([found, again])
    right = _alone(name)
    way = max(float((p.detach() - q).abs().max()) for p, q in zip(Net().parameters(), right, strict=True))
    off = max(float((p - q).abs().max()) for p, q in zip(found, right, strict=True))
    assert off <= LOOSE.get(name, 0.02) * way


def _one_rank(name: str) -> list[Tensor]:
    net = Net()
    reducer = Reducer(net.named_parameters())
    attach_hook(reducer, *_hooked(name))
    reducer.prepare()
    _loss(net, 0, 0).backward()
    reducer.finish()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ["allreduce", "fp16", "power_sgd", "fp16 of power_sgd"])
def test_one_process_without_a_group(name: str) -> None:
    exact = Net()
    _loss(exact, 0, 0).backward()
    for found, right in zip(_one_rank(name), [p.grad for p in exact.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(found, right, rtol=0.02, atol=0.02 * float(right.abs().max()))


def _last_round_together(torchs: bool) -> list[bool]:
    """In round 1, the last that goes over both ranks, only rank 1 uses a layer: both get its gradient."""
    rank, net = dist.get_rank(), Net()
    state: Any = hooks.PostLocalSGDState(2, local_allreduce=False)
    hook: Any = hooks.post_local_sgd
    if torchs:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as theirs

        state, hook = theirs.PostLocalSGDState(None, None, 2, False), theirs.post_localSGD_hook
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, hook)
    found = []
    for step in range(4):
        net.zero_grad()
        _loss(model, rank, step, seldom=rank == 1).backward()
        found.append(net.seldom.weight.grad is not None)
    return found


@pytest.mark.parametrize("torchs", [False, True])
def test_marks_go_over_the_group_of_their_round(ranks: RankPool, torchs: bool) -> None:
    """They were asked for after the hook had counted the round: the last one together was taken for a local one."""
    assert ranks(2).run(_last_round_together, torchs) == [[True, True, False, False], [True, True, True, True]]


def _local_steps(outer: bool) -> tuple[list[Tensor], list[bool]]:
    rank, net = dist.get_rank(), Net()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL)
    model.register_comm_hook(hooks.PostLocalSGDState(2, local_allreduce=False), hooks.post_local_sgd)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    make: Any = OuterOptimizer if outer else ParameterAverager
    averager = make(net.parameters(), 3, 2)
    same = []
    for step in range(9):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        averager.step()
        mine = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both) == averager.agreed
        same.append(averager.agreed)
    return [parameter.detach() for parameter in net.parameters()], same


@pytest.mark.parametrize("outer", [False, True])
def test_local_steps_with_averages(ranks: RankPool, outer: bool) -> None:
    for _, same in ranks(2).run(_local_steps, outer):
        if outer:
            assert same == [True, True, False, False, True, False, False, True, False]
        else:
            assert same == [True, True, True, False, False, True, False, False, True]


def _resumed(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Killed after 4 of 8 steps, with the layout of its buckets and the hook's memory."""
    rank, net = dist.get_rank(), Net()

    def play(net: nn.Module, reducer: Reducer, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            reducer.prepare()
            _loss(net, rank, step).backward()
            reducer.finish()
            optimizer.step()

    state, hook = _hooked(name)
    if name == "power_sgd":
        state.rank = 2
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=SMALL, first_bucket_mb=SMALL)
    attach_hook(reducer, state, hook)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    play(net, reducer, optimizer, range(4))
    weights, saved, plan = copy.deepcopy(net.state_dict()), as_checkpoint(hooks.save_state(state)), reducer.plan()
    play(net, reducer, optimizer, range(4, 8))
    again = Net()
    again.load_state_dict(weights)
    state, hook = _hooked(name)
    if name == "power_sgd":
        state.rank = 2
    hooks.load_state(state, saved)
    reducer = Reducer(again.named_parameters(), bucket_cap_mb=SMALL, first_bucket_mb=SMALL, plan=plan)
    attach_hook(reducer, state, hook)
    play(again, reducer, torch.optim.SGD(again.parameters(), 0.1), range(4, 8))
    return list(net.parameters()), list(again.parameters())


@pytest.mark.parametrize("name", ["power_sgd", "torch PowerSGD"])
def test_a_killed_run_resumes_bitwise(ranks: RankPool, name: str) -> None:
    for whole, part in ranks(2).run(_resumed, name):
        assert all(torch.equal(one, other) for one, other in zip(whole, part, strict=True))
