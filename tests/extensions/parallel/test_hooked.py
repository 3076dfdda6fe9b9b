"""A hook in the reducer: sparse gradients beside it, parameters without a gradient, ranks on which it fails."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel import absent_ranks, hooks
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from tests.tools.pool import RankPool

SMALL = 100 / 2**20  # MiB: a bucket a parameter


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(6, 5, sparse=True)
        self.body = nn.Linear(5, 5)

    def forward(self, places: Tensor) -> Tensor:
        return self.body(self.words(places))


def _sparse_gradients() -> tuple[int, list[Tensor]]:
    rank, net = dist.get_rank(), Words()
    state = hooks.PowerSGDState(1, start=1, min_compression_rate=0.1)
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, hooks.power_sgd)
    for _ in range(3):
        net.zero_grad()
        model(torch.tensor([rank, 3])).sum().backward()
    net = Words()
    model = DistributedDataParallel(net)
    model.register_comm_hook(hooks.PostLocalSGDState(1, local_allreduce=False), hooks.post_local_sgd)
    found = []
    for _ in range(2):
        net.zero_grad()
        model(torch.tensor([rank, 3])).sum().backward()
        assert net.words.weight.grad is not None
        found.append(net.words.weight.grad.to_dense())
    return state.iteration, found


def test_sparse_gradients_do_not_stop_a_hook_from_counting_its_rounds(ranks: RankPool) -> None:
    """No bucket was the last one: PowerSGD and local steps never began. And local steps averaged the sparse ones."""
    own = []
    for rank in range(2):
        net = Words()
        net(torch.tensor([rank, 3])).sum().backward()
        assert net.words.weight.grad is not None
        own.append(net.words.weight.grad.to_dense())
    for rank, (rounds, (together, local)) in enumerate(ranks(2).run(_sparse_gradients)):
        assert rounds == 3
        torch.testing.assert_close(together, (own[0] + own[1]) / 2)
        torch.testing.assert_close(local, own[rank])


class InTurn(nn.Module):
    """Two layers, one of which is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(9, 8), nn.Linear(9, 8)])

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.layers[turn](x).tanh()


STATES: dict[str, Any] = {
    "power_sgd": lambda: (hooks.PowerSGDState(1, start=0, min_compression_rate=0.1), hooks.power_sgd),
    "bf16 of power_sgd": lambda: (
        hooks.PowerSGDState(1, start=0, min_compression_rate=0.1),
        hooks.bf16_wrapper(hooks.power_sgd),
    ),
}


def _in_turn(steps: int) -> dict[str, list[tuple[Tensor, Tensor, Tensor]]]:
    """For each weight: the sum of its gradients on this rank, of those after the hook, and what the rank still owes."""
    rank, found = dist.get_rank(), {}
    make: Any
    for name, make in STATES.items():
        net = InTurn()
        state, hook = make()
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, hook)
        sums = [[torch.zeros(8, 9) for _ in range(2)] for _ in range(2)]
        for step in range(steps):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
            turn = step % 2 if step % 3 else (step + rank) % 2  # every third time the ranks use different ones
            alone = copy.deepcopy(net)
            for one, doing in ((alone, alone), (net, model)):
                one.zero_grad()
                doing(x, turn).sum().backward()
                for place, layer in enumerate(one.layers):
                    if layer.weight.grad is not None:
                        sums[one is net][place] += layer.weight.grad
        owed = [state._memory._records[layer.weight]["error"].view(8, 9).clone() for layer in net.layers]
        found[name] = list(zip(*sums, owed, strict=True))
    return found


def test_what_is_owed_to_a_parameter_waits_until_it_has_a_gradient(ranks: RankPool) -> None:
    """It was paid into a mean that nobody took where no rank used the parameter: half of a GAN's errors were lost."""
    zero, one = ranks(2).run(_in_turn, 12)
    for name in STATES:
        loose = 0.05 if "bf16" in name else 1e-5
        for (sent, got, owed), (other_sent, other_got, other_owed) in zip(zero[name], one[name], strict=True):
            assert torch.equal(got, other_got)
            torch.testing.assert_close(got + (owed + other_owed) / 2, (sent + other_sent) / 2, rtol=0, atol=loose)


def _checked() -> list[bool]:
    net = nn.Linear(3, 2)
    model = DistributedDataParallel(net, check_reduction=True)
    model.register_comm_hook(hooks.PostLocalSGDState(1, local_allreduce=False), hooks.post_local_sgd)
    for _ in range(3):
        net.zero_grad()
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    return [float(net.weight.grad[0, 0]) == 1.0 + dist.get_rank()]  # type: ignore[index]


def test_check_reduction_expects_no_equal_gradients_of_local_steps(ranks: RankPool) -> None:
    assert ranks(2).run(_checked) == [[True], [True]]


def _pickled() -> list[str]:
    states = [hooks.PowerSGDState(start=0), hooks.PostLocalSGDState(9, local_allreduce=False)]
    for state, hook in zip(states, [hooks.power_sgd, hooks.post_local_sgd], strict=True):
        net = nn.Linear(3, 2)
        model = DistributedDataParallel(net)
        model.register_comm_hook(state, hook)
        model(torch.ones(1, 3)).sum().backward()
    return [type(pickle.loads(pickle.dumps(state))).__name__ for state in states]


def test_a_state_can_be_pickled_after_it_was_registered(ranks: RankPool) -> None:
    """It had been given the default group, which also outlived itself in it."""
    assert ranks(2).run(_pickled)[0] == ["PowerSGDState", "PostLocalSGDState"]


def _fails(broken: str) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    rounds = 0

    def hook(state: Any, bucket: GradBucket) -> Any:
        nonlocal rounds
        rounds += bucket.index() == 0
        wrong = dist.get_rank() == 1 and rounds == 2
        if wrong and broken == "raises":
            raise ArithmeticError("mine")
        buffer = bucket.buffer().div_(2)
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return None if wrong else future.then(lambda done: done.value()[0])

    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    model.register_comm_hook(None, hook)
    try:
        with patch.object(absent_ranks, "PATIENCE", 0.5):
            for _ in range(4):
                model(torch.ones(2, 6)).sum().backward()
    except (RuntimeError, TypeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("broken", ["raises", "gives nothing"])
def test_a_hook_that_fails_on_one_rank_is_told_on_all(ranks: RankPool, broken: str) -> None:
    """The others had gloo's words alone, from the middle of the backward."""
    zero, one = ranks(2).run(_fails, broken)
    assert one == "ArithmeticError: mine" if broken == "raises" else one.startswith("TypeError: rank 1: the commun")
    assert zero.startswith("RuntimeError: rank 0, averaging the gradients of round 2: rank 1 is missing")
    assert ("ArithmeticError: mine" if broken == "raises" else "It must return a torch.futures.Future") in zero
