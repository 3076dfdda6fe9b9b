"""Ranks with different numbers of batches: torch's ``Join`` over our container, alone and with others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.extensions.parallel.nets import batch_of, make_net
from tests.tools.pool import RankPool

COUNTS = [2, 4, 3]
"""Batches by rank."""


def _joined(by_all: bool, zero: bool, epochs: int = 1, checked: bool = False) -> tuple[list[Tensor], int, bool]:
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0002, check_reduction=checked)
    optimizer: Any
    if zero:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rank = dist.get_rank()
    for _ in range(epochs):
        joinables = [model, optimizer] if zero else [model]
        with Join(joinables, divide_by_initial_world_size=by_all) if zero else model.join(by_all):
            for step in range(COUNTS[rank]):
                optimizer.zero_grad()
                model(batch_of(step, rank)).square().mean().backward()
                optimizer.step()
    return [p.detach().clone() for p in net.parameters()], model.reducer.rounds, model._join_config.enable


def _alone(by_all: bool, epochs: int = 1) -> list[Tensor]:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(epochs):
        for step in range(max(COUNTS)):
            optimizer.zero_grad()
            there = [rank for rank in range(3) if step < COUNTS[rank]]
            for rank in there:
                (net(batch_of(step, rank)).square().mean() / (3 if by_all else len(there))).backward()
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.everyday
@pytest.mark.parametrize("zero", [False, True], ids=["", "with ZeroRedundancyOptimizer"])
@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those there"])
def test_uneven_numbers_of_batches_train_as_one_process(ranks: RankPool, by_all: bool, zero: bool) -> None:
    expected = _alone(by_all, 2)
    for found, rounds, enabled in ranks(3).run(_joined, by_all, zero, 2):
        assert rounds == 8
        assert not enabled
        for mine, right in zip(found, expected, strict=True):
            assert (mine - right).abs().max() <= 1e-12 * right.abs().max()


def test_join_and_check_reduction(ranks: RankPool) -> None:
    expected = _alone(True)
    for found, _, _ in ranks(3).run(_joined, True, False, 1, True):
        for mine, right in zip(found, expected, strict=True):
            assert (mine - right).abs().max() <= 1e-12 * right.abs().max()


def _accumulating() -> list[Tensor]:
    """One more batch on rank 1, and gradients that are reduced in every second one."""
    net = make_net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with model.join():
        for step in range(4 + 2 * dist.get_rank()):
            with nullcontext() if step % 2 else model.no_sync():
                model(batch_of(step, dist.get_rank())).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def test_accumulation_in_join(ranks: RankPool) -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(6):
        for rank in range(2):
            if step < 4 + 2 * rank:
                (net(batch_of(step, rank)).square().mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(2).run(_accumulating):
        for mine, right in zip(found, net.parameters(), strict=True):
            assert (mine - right).abs().max() <= 1e-12 * right.abs().max()


def _buffers() -> list[Any]:
    net = make_net(norm=True)
    model = DistributedDataParallel(net)
    with model.join():
        for step in range(1 + 2 * dist.get_rank()):
            model(batch_of(step, dist.get_rank()) + dist.get_rank()).square().mean().backward()
    # outside of it everything is as before
    model(batch_of(9, 0)).square().mean().backward()
    return [int(net[1].num_batches_tracked), net[1].running_mean.clone()]


def test_buffers_and_the_final_model_are_those_of_a_rank_that_trained(ranks: RankPool) -> None:
    first, second = ranks(2).run(_buffers)
    assert first[0] == second[0] == 4
    assert torch.equal(first[1], second[1])


def _throwing() -> str:
    model = DistributedDataParallel(make_net())

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                model(batch_of(step, 0)).square().mean().backward()

    with pytest.raises(RuntimeError) as raised:
        train()
    return str(raised.value)


def test_all_ranks_can_be_made_to_raise_when_one_has_run_out(ranks: RankPool) -> None:
    first, second = ranks(2).run(_throwing)
    assert "Rank 0 exhausted all inputs" in first
    assert "at least one rank that exhausted inputs" in second


def _not_enabled() -> int:
    model = DistributedDataParallel(make_net())
    with model.join(enable=False):
        for step in range(2):
            model(batch_of(step, 0)).square().mean().backward()
    return model.reducer.rounds


def test_join_can_be_switched_off(ranks: RankPool) -> None:
    assert ranks(2).run(_not_enabled) == [2, 2]


def join_twice() -> list[float]:
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    weight = model.module.weight
    means = []
    for _ in range(2):
        with model.join():
            for _ in range(2 + dist.get_rank()):
                model(torch.ones(1, 1)).sum().backward()
                means.append(weight.grad.item())
                model.zero_grad()
    return means


def test_a_rank_that_followed_starts_its_next_loop_without_the_others_gradients(ranks: RankPool) -> None:
    """They stayed in ``.grad``, and the first backward of the second join added to them."""
    short, long = ranks(2).run(join_twice, timeout=40)
    assert short == [1.0, 1.0] * 2
    assert long == [1.0, 1.0, 0.5] * 2


def _chained(in_turn: bool) -> list[Any]:
    """Two models in one Join: the second takes the first one's outputs, or each trains by itself."""
    torch.manual_seed(2)
    nets = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    group = dist.new_group()
    first, second = (DistributedDataParallel(net, process_group=group) for net in nets)
    try:
        with Join([first, second]):
            for step in range(1 + 2 * dist.get_rank()):
                batch = batch_of(step, dist.get_rank())
                if in_turn:
                    first(batch).square().mean().backward()
                    second(batch).square().mean().backward()
                else:
                    second(first(batch)).square().mean().backward()
    except RuntimeError as error:
        for model in (first, second):
            model.reducer.detach()
        return [str(error)]
    return [p.grad is not None for net in nets for p in net.parameters()]


def test_models_whose_forwards_interlock_in_a_join_are_an_error(ranks: RankPool) -> None:
    """Ranks without batches waited in the first model's backward, and the others in the second one's forward."""
    first, second = ranks(2).run(_chained, False)
    assert second[0].startswith("join, rank 1: a forward of this model is between the forward and the backward")
    assert "rank 1 is missing: it raised RuntimeError: join, rank 1" in first[0]
    assert ranks(2).run(_chained, True) == [[False] * 4, [True] * 4]
