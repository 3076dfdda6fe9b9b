"""When a backward begins and ends: outputs of all shapes, partial backwards, checkpoints, losses around the outputs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.utils.checkpoint import checkpoint

from lockstep.extensions.parallel.backward_watcher import BackwardWatcher, find_tensors
from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool

# -- when a backward begins and ends -------------------------------------------------------------------------


class Calls:
    """In a reducer's place: notes what it is told."""

    def __init__(self) -> None:
        self.sync, self.zero_weight = True, False
        self.lock = nullcontext()
        self.told: list[str] = []

    def _prepare(self) -> None:
        self.told.append("prepare" if self.sync else "prepare alone")

    def _before_backward(self) -> None:
        assert self.sync or self.told == []

    def _backward_ended(self) -> None:
        self.told.append("finish")


class Watched:
    """A net, a watch over it, and what the reducer would be told."""

    def __init__(self, static: bool = False) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.calls = Calls()
        parameters = list(self.net.parameters())
        self.watch = BackwardWatcher(self.calls, parameters, self.calls, static)  # type: ignore[arg-type]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self.watch.unprepared_grad())
        self.x = torch.randn(2, 3, requires_grad=True)

    def __call__(self, outputs: Any, sync: bool = True) -> Any:
        self.watch.before_forward()
        self.watch.watch_outputs(outputs, sync)
        return outputs

    def told(self) -> list[str]:
        found, self.calls.told = self.calls.told, []
        return found


ROUND = ["prepare", "finish"]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_second_backward_through_the_same_outputs_is_a_second_round(watched: Watched) -> None:
    output = watched(watched.net(watched.x)).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert watched.told() == ROUND * 2


def _asks_for_inputs(watched: Watched) -> None:
    torch.autograd.grad(watched(watched.net(watched.x)).sum(), watched.x)


def _asks_for_parameters(watched: Watched) -> None:
    torch.autograd.grad(watched(watched.net(watched.x)).sum(), list(watched.net.parameters()))


def _leaves_some_to_inputs(watched: Watched) -> None:
    watched(watched.net(watched.x)).sum().backward(inputs=[watched.x])


def _asks_through_a_checkpoint(watched: Watched) -> None:
    output = watched(checkpoint(watched.net, watched.x, use_reentrant=False))
    torch.autograd.grad(output.sum(), watched.x)


@pytest.mark.parametrize(
    "ask", [_asks_for_inputs, _asks_for_parameters, _leaves_some_to_inputs, _asks_through_a_checkpoint]
)
def test_autograd_grad_is_no_backward(watched: Watched, ask: Callable[[Watched], None]) -> None:
    ask(watched)
    assert watched.told() == []
    assert watched.watch.expected
    watched(watched.net(watched.x)).sum().backward()
    assert watched.told() == ROUND


def test_a_backward_to_some_parameters_is_one(watched: Watched) -> None:
    watched(watched.net(watched.x)).sum().backward(inputs=[watched.net[0].weight])  # type: ignore[list-item]
    assert watched.told() == ROUND


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kept", [False, True], ids=["outputs dropped", "outputs kept"])
def test_a_reentrant_checkpoint_ends_with_the_outer_backward(static: bool, kept: bool) -> None:
    watched = Watched(static)
    output = watched(checkpoint(watched.net, watched.x, use_reentrant=True).tanh())
    loss = output.sum()
    if not kept:
        del output
    loss.backward()
    assert watched.told() == ROUND


def test_a_backward_is_synchronised_if_one_of_its_forwards_is(watched: Watched) -> None:
    watched(watched.net(watched.x), sync=False).sum().backward()
    assert watched.told() == ["prepare alone", "finish"]
    (watched(watched.net(watched.x), sync=False).sum() + watched(watched.net(watched.x)).sum()).backward()
    assert watched.told()[-1] == "finish"
    assert watched.calls.sync


def test_a_parameter_that_is_an_output_is_watched_once(watched: Watched) -> None:
    for _ in range(3):
        watched([watched.net(watched.x), watched.net[0].bias])
    assert len(watched.watch._leaf_hooks) == 1
    watched.net[0].bias.sum().backward()  # type: ignore[operator]
    assert watched.told() == ROUND


@dataclass
class Answer:
    value: Tensor
    more: Any = None


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Loop:
    """Refers to itself."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.me, self.net = value, self, nn.Linear(1, 1)


def test_tensors_are_found_wherever_they_are() -> None:
    one, two = torch.ones(1), torch.zeros(1)
    for outputs, expected in [
        (one, [one]),
        ({"a": [one, (two, "text")]}, [one, two]),
        (Answer(one, {"x": Answer(two)}), [one, two]),
        (Slots(one), [one]),
        (Loop(one), [one]),
        ([Loop(one), Slots(two), None, 3], [one, two]),
    ]:
        found = list(find_tensors(outputs))
        assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


def _gone_in_a_step() -> bool:
    from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

    gone = [DistributedDataParallel(nn.Linear(1, 1))]
    stepped = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)

    def forget(*_: Any) -> None:
        gone.clear()
        gc.collect()

    first = register_optimizer_step_pre_hook(forget)
    _global_optimizer_pre_hooks.move_to_end(first.id, last=False)
    try:
        stepped.step()
    finally:
        first.remove()
    return not gone


def test_a_container_that_goes_while_an_optimizer_steps_does_not_break_the_step(ranks: RankPool) -> None:
    """Its hook went with it, in the middle of torch's loop over the hooks: "OrderedDict mutated during iteration"."""
    assert ranks(2).run(_gone_in_a_step) == [True, True]


# -- optimizers that step inside the backward step on the mean of the ranks' gradients -----------------------


def train(before: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    fused = copy.deepcopy(plain)
    settings = {"lr": 0.1, "momentum": 0.9}
    if before:
        _apply_optimizer_in_backward(torch.optim.SGD, fused[1].parameters(), settings)
    plain_ddp, fused_ddp = DistributedDataParallel(plain), DistributedDataParallel(fused)
    if not before:
        _apply_optimizer_in_backward(torch.optim.SGD, fused[1].parameters(), settings)
    optimizer = torch.optim.SGD(plain[1].parameters(), **settings)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        micro_batches = torch.randn(2, 4, 3)
        start = copy.deepcopy(fused[1].state_dict())
        for ddp in (plain_ddp, fused_ddp):
            with ddp.no_sync():
                ddp(micro_batches[0]).sum().backward()
        assert all(torch.equal(start[name], value) for name, value in fused[1].state_dict().items())
        for ddp in (plain_ddp, fused_ddp):
            ddp(micro_batches[1]).sum().backward()
        optimizer.step()
        for mine, theirs in zip(plain.parameters(), fused.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert all(parameter.grad is None for parameter in fused[1].parameters())
        assert all(parameter.grad is not None for parameter in fused[0].parameters())
        plain.zero_grad()
        fused.zero_grad()


@pytest.mark.parametrize("before", [True, False], ids=["applied-before-wrapping", "applied-after"])
def test_the_optimizer_steps_once_on_the_mean(ranks: RankPool, before: bool) -> None:
    ranks(2).run(train, before, timeout=60)


# -- torch.distributed.autograd, whose gradients lie in a context --------------------------------------------


def _in_context(folder: str) -> list[str]:
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    model = DistributedDataParallel(nn.Linear(3, 3))
    said = []
    for quiet in (nullcontext(), model.no_sync(), torch.no_grad()):
        with autograd.context(), quiet:
            try:
                model(torch.ones(2, 3))
                said.append("")
            except ValueError as error:
                said.append(str(error))
    model(torch.ones(2, 3)).sum().backward()
    rpc.shutdown()
    return [*said, str(model.reducer.rounds)]


def test_a_forward_whose_gradients_would_stay_in_a_context_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for rank, (refused, *others) in enumerate(ranks(2).run(_in_context, str(tmp_path), timeout=60)):
        assert refused.startswith(f"rank {rank}: a forward in a context of torch.distributed.autograd")
        assert "Run forward and loss.backward() outside of it" in refused
        assert others == ["", "", "1"]
