"""Optimizers of a container, whose states the ranks share out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lockstep.engines.ddp.owned_optimizer import shard_optimizers
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.ground import comm
from lockstep.precision.base import LossScaler
from tests.engines.ddp.test_owned_optimizer import batch_of, values
from tests.tools.pool import RankPool

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True),
    "adam fused": lambda groups: torch.optim.Adam(groups, 0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, 0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, 0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, 0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 0.01, initial_accumulator_value=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, 0.5),
    "asgd": lambda groups: torch.optim.ASGD(groups, 0.01, t0=2),
    "rprop": lambda groups: torch.optim.Rprop(groups, 0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, 0.01),
}


class Net(nn.Module):
    """Weights of odd sizes, channels_last, tied, of no dimension, empty, unused, and used now and then."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 33)
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.recurrent = nn.LSTM(33, 9)
        self.norm = nn.LayerNorm(9)
        self.scale = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Linear(3, 5)
        self.never = nn.Parameter(torch.ones(11))
        self.empty = nn.Parameter(torch.ones(0, 2))
        self.head = nn.Linear(9, 7, bias=False)
        self.tied = self.head
        self.to(dtype)

    def forward(self, batch: Tensor, sometimes: bool = True) -> Tensor:
        images = batch.reshape(-1, 1, 1, 7).expand(-1, 3, 4, 7)
        hidden = self.first(batch) + self.conv(images).mean((1, 2, 3)).reshape(batch.shape[:-1])[..., None]
        out = self.tied(self.norm(self.recurrent(hidden)[0])) * self.scale
        if sometimes:
            out = out + self.sometimes(batch[..., :3]).sum(-1, keepdim=True)
        return out.square().mean()


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """A group with weight decay and one without."""
    decay = [p for p in net.parameters() if p.dim() > 1]
    return [{"params": decay, "weight_decay": 0.01}, {"params": [p for p in net.parameters() if p.dim() <= 1]}]


def made(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "muon":  # for matrices alone
        return torch.optim.Muon([p for p in net.parameters() if p.dim() == 2 and p.numel()], 0.02)
    return OPTIMIZERS[name](groups_of(net))


def uses(step: int, rank: int) -> bool:
    return step % 2 == 0 and rank == 0


def same(one: Any, other: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(
    net: nn.Module, model: nn.Module, optimizer: Any, steps: range, accumulate: int = 1, clip: Any = None
) -> None:
    """Windows of ``accumulate`` micro-batches on this rank."""
    rank, dtype = dist.get_rank(), next(net.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            model.require_backward_grad_sync = micro + 1 == accumulate  # type: ignore[assignment]
            (model(batch_of(step * accumulate + micro, rank, dtype), uses(step, rank)) / accumulate).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def alone(name: str, world: int, steps: int, accumulate: int, clip: float) -> tuple[dict[str, Tensor], Any]:
    """The same on one process."""
    net = Net()
    optimizer = made(name, net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            for micro in range(accumulate):
                loss = net(batch_of(step * accumulate + micro, rank), uses(step, rank))
                (loss / accumulate / world).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return values(net), optimizer.state_dict()


# -- numbers -------------------------------------------------------------------------------------------------


def owned(names: list[str], accumulate: int, clip: float) -> list[tuple[dict[str, Tensor], Any, float]]:
    """Weights and state of each, and the share of the state that is here."""
    found = []
    for name in names:
        net = Net()
        optimizer = made(name, net)
        model = DistributedDataParallel(net, bucket_cap_mb=0.002)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        shard_optimizers(model, optimizer)
        for step in range(4):
            train(net, model, optimizer, range(step, step + 1), accumulate, clip)
            scheduler.step()
        state = optimizer.state_dict()
        whole, here = (
            sum(t.nbytes for one in each.values() for t in one.values() if isinstance(t, Tensor))
            for each in (state["state"], optimizer.state)
        )
        found.append((values(net), state, here / whole))
    return found


QUICK = ["adam", "adagrad", "adafactor", "muon"]


@pytest.mark.parametrize(
    ("world", "names", "accumulate"),
    [
        (2, QUICK, 1),
        (3, ["adamw"], 2),
        (4, ["sgd"], 1),
        pytest.param(2, [*OPTIMIZERS, "muon"], 3, marks=pytest.mark.slow),
        pytest.param(4, [*OPTIMIZERS, "muon"], 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_the_model_of_one_process(ranks: RankPool, world: int, names: list[str], accumulate: int) -> None:
    of_ranks = ranks(world).run(owned, names, accumulate, 0.5, timeout=120)
    for number, name in enumerate(names):
        weights, state = alone(name, world, 4, accumulate, 0.5)
        for found, theirs, _ in (of_rank[number] for of_rank in of_ranks):
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-12, msg=name)
            assert same(theirs, of_ranks[0][number][1]), name
            torch.testing.assert_close(theirs["state"], state["state"], rtol=1e-9, atol=1e-12, msg=name)
            assert theirs["param_groups"] == state["param_groups"]
        shares = [of_rank[number][2] for of_rank in of_ranks]
        assert sum(shares) == pytest.approx(1)
        assert max(shares) < 0.9, name


def _bits(pieces: int) -> list[bool]:
    """Whether weights have the bits of ranks that keep all states, with messages of so many bytes."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        results = []
        for sharing in (False, True):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 7)).to(dtype)
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
            model = DistributedDataParallel(net, shared_memory=False)
            if sharing:
                shard_optimizers(model, optimizer)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(comm, "PIECE", pieces)
                for step in range(3):
                    optimizer.zero_grad()
                    model(batch_of(step, dist.get_rank()).to(dtype)).abs().square().mean().backward()
                    optimizer.step()
            results.append(values(net))
        found.append(same(*results))
    return found


@pytest.mark.parametrize("pieces", [100, 2**26])
def test_the_bits_are_those_of_ranks_that_keep_all_states(ranks: RankPool, pieces: int) -> None:
    assert ranks(3).run(_bits, pieces) == [[True, True, True]] * 3


def _with_a_hook() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for sharing in (False, True):
        net = Net(torch.float32)
        optimizer = torch.optim.Adam(net.parameters())
        model = DistributedDataParallel(net, check_reduction=True, gradient_as_bucket_view=False)
        model.register_comm_hook(None, allreduce_hook)
        if sharing:
            shard_optimizers(model, optimizer)
        train(net, model, optimizer, range(3))
        found.append(values(net))
    return found[0], found[1]


def test_a_communication_hook_and_checked_reductions_go_together_with_it(ranks: RankPool) -> None:
    for plain, sharing in ranks(2).run(_with_a_hook):
        assert same(plain, sharing)


# -- what is around a step -----------------------------------------------------------------------------------


def _around() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model = DistributedDataParallel(net)
    shard_optimizers(model, optimizer)
    found: dict[str, Any] = {}

    def look(key: str) -> Callable[..., None]:
        return lambda *_: found.update({key: [p.grad is not None for p in net.parameters()]})

    optimizer.register_step_pre_hook(look("before"))
    optimizer.register_step_post_hook(look("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch_of(0, dist.get_rank())).square().mean()
        loss.backward()
        return loss

    found["loss"] = optimizer.step(closure).item() > 0
    found["states"] = len(optimizer.state)
    found["weights"] = values(net)
    found["kept"] = len(optimizer.state_dict()["state"])
    assert copy.deepcopy(optimizer).step.__func__ is torch.optim.Adam.step  # a copy has its part of the states alone
    return found


def test_hooks_see_all_gradients_and_a_closure_runs_once(ranks: RankPool) -> None:
    zero, one = ranks(2).run(_around)
    for found in (zero, one):
        assert found["before"] == found["after"] == [True] * 4
        assert found["loss"]
        assert found["kept"] == 4
    assert zero["states"] + one["states"] == 4
    assert same(zero["weights"], one["weights"])


def _scaled() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 40)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = DistributedDataParallel(net)
    shard_optimizers(model, optimizer)
    scaler, scales = LossScaler("cpu", init_scale=2.0**10, growth_interval=2), []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * (step + 1 + dist.get_rank()))[:, :2].square().mean()
        scaler.scale(loss * torch.inf if step == 1 and dist.get_rank() == 0 else loss).backward()
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, values(net)


def test_all_ranks_leave_out_a_step_whose_gradient_overflowed(ranks: RankPool) -> None:
    first, second = ranks(2).run(_scaled)
    assert same(first, second)
    assert first[0][1] < first[0][0]
    assert all(bool(value.isfinite().all()) for value in first[1].values())


class Shares(nn.Module):
    """Two parameters in one memory, as ``one.data = other.data`` leaves them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(3, 5).double(), nn.Linear(3, 5).double()
        self.second.weight.data = self.first.weight.data

    def forward(self, batch: Tensor) -> Tensor:
        return self.first(batch).square().mean() + self.second(batch).sin().mean()


def _in_one_memory() -> dict[str, Tensor]:
    net = Shares()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    model = DistributedDataParallel(net)
    shard_optimizers(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(batch_of(step, dist.get_rank())[:, 0, :3]).backward()
        optimizer.step()
    assert net.first.weight.data_ptr() == net.second.weight.data_ptr()
    return values(net)


def test_parameters_in_one_memory_have_one_owner(ranks: RankPool) -> None:
    net = Shares()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (net(batch_of(step, rank)[:, 0, :3]) / 2).backward()
        optimizer.step()
    for found in ranks(2).run(_in_one_memory):
        torch.testing.assert_close(found, values(net), rtol=0, atol=1e-12)


# -- states --------------------------------------------------------------------------------------------------


def _saved(steps: int, state: Any = None, weights: Any = None) -> tuple[dict[str, Tensor], Any]:
    net = Net()
    optimizer = made("adam", net)
    model = DistributedDataParallel(net)
    shard_optimizers(model, optimizer)
    if state is not None:
        net.load_state_dict(weights, strict=False)
        optimizer.load_state_dict(state)
        assert same(optimizer.state_dict(), state)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(step, 0)).backward()  # the same on all ranks, for any number of them
        optimizer.step()
    assert not optimizer.state[net.never]  # a look at what is not there: a defaultdict
    return values(net), optimizer.state_dict()


def test_a_state_dict_is_the_ordinary_one_for_any_number_of_ranks(ranks: RankPool) -> None:
    (weights, state), other = ranks(2).run(_saved, 3)
    assert same((weights, state), other)
    ((expected, after),) = ranks(1).run(_saved, 2, state, weights)
    kept = {number: one for number, one in after["state"].items() if one}  # but for what was looked at
    for world in (2, 3):
        for found, theirs in ranks(world).run(_saved, 2, state, weights):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
            torch.testing.assert_close(theirs["state"], kept, rtol=0, atol=1e-14)


# -- owners, and who has none --------------------------------------------------------------------------------


def _refused() -> bool:
    model = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match=r"sparse gradients of \['weight'\]"):
        shard_optimizers(model, torch.optim.SGD(model.parameters(), 0.1))
    model = DistributedDataParallel(nn.Linear(2, 2))
    shard_optimizers(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=r"join\(\) with sharded optimizers"):
        model.join()
    return True


def test_what_does_not_go_together_is_refused(ranks: RankPool) -> None:
    assert ranks(2).run(_refused) == [True, True]
