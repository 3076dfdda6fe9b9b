"""Sharded optimizers against one process and against unsharded ranks: bits, state, gradients, refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.zero.exchange import SharedBuffer, SharedScatter
from lockstep.parallel.zero.flat_parameters import SlicedGradient
from lockstep.parallel.zero.optimizers import check_elementwise, elementwise
from lockstep.parallel.zero.reducer import ShardedReducer, shard_optimizers
from lockstep.precision.base import LossScaler
from lockstep.testing.pool import RankFailure, RankPool

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, 0.01, amsgrad=True),
    "adam fused": lambda groups: torch.optim.Adam(groups, 0.01, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, 0.01, foreach=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, 0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, 0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, 0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 0.01, initial_accumulator_value=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, 0.5),
    "asgd": lambda groups: torch.optim.ASGD(groups, 0.01, t0=2),
    "rprop": lambda groups: torch.optim.Rprop(groups, 0.01),
}
SMALL = {"bucket_cap_mb": 2000 / 2**20, "first_bucket_mb": 400 / 2**20}  # several buckets of a small model


class Net(nn.Module):
    """Weights in and out of modules' forwards, of odd sizes, channels_last, tied, of no dimension, unused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.attention = nn.MultiheadAttention(33, 3, batch_first=True)  # uses its out_proj's weight, not its forward
        self.recurrent = nn.LSTM(33, 9)  # keeps a list of its weights
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
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        out = self.tied(self.norm(self.recurrent(hidden)[0])) * self.scale
        if sometimes:
            out = out + self.sometimes(batch[..., :3]).sum(-1, keepdim=True)
        return out.square().mean() + self.head.weight.square().mean()


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """A group with weight decay and one without."""
    decay = [p for p in net.parameters() if p.dim() > 1]
    return [{"params": decay, "weight_decay": 0.01}, {"params": [p for p in net.parameters() if p.dim() <= 1]}]


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, 7, generator=generator, dtype=torch.float64).to(dtype)


def net_of(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net(dtype)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def same(one: Any, other: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal, bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(
    net: Net,
    optimizer: torch.optim.Optimizer,
    reducer: Reducer,
    steps: range,
    *,
    clip: Callable[[], Any] | None = None,
    accumulate: int = 1,
    scheduler: Any = None,
) -> None:
    """Windows of ``accumulate`` micro-batches; some parameters are used in even windows only, on odd ranks only."""
    rank, dtype = dist.get_rank(), net.scale.dtype
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            reducer.sync = micro + 1 == accumulate
            sometimes = step % 2 == 0 and rank % 2 == dist.get_world_size() % 2
            loss = net(batch_of(step * accumulate + micro, rank, dtype), sometimes)
            reducer.prepare()
            loss.backward()
            reducer.finish()
        if clip is not None:
            clip()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


# -- bits ----------------------------------------------------------------------------------------------------


def _both(name: str, accumulate: int = 1, shared: bool = True) -> tuple[bool, bool, float]:
    """The same training with and without sharding: are weights and states equal; how much state is here?"""
    found = []
    share = 0.0
    for sharded in (False, True):
        net = net_of()
        optimizer = OPTIMIZERS[name](groups_of(net))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if sharded:
            reducer: Reducer = ShardedReducer(net, [optimizer], shared_memory=shared, **SMALL)
        else:
            reducer = Reducer(net.named_parameters(), shared_memory=False, **SMALL)
        train(net, optimizer, reducer, range(4), accumulate=accumulate, scheduler=scheduler)
        state = optimizer.state_dict()
        if sharded:
            whole = sum(t.nbytes for s in state["state"].values() for t in s.values() if isinstance(t, Tensor))
            share = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)) / whole
        found.append((values(net), state))
        reducer.detach()
        assert same(values(net), found[-1][0])
    return same(found[0][0], found[1][0]), same(found[0][1], found[1][1]), share


def _several(names: list[str]) -> list[tuple[str, Any]]:
    return [(name, _both(name)) for name in names] + [("adam, accumulated", _both("adam", 3, False))]


QUICK = ["sgd", "adam fused", "adagrad"]


@pytest.mark.parametrize("names", [QUICK, pytest.param([*OPTIMIZERS], marks=pytest.mark.slow)], ids=["some", "all"])
def test_two_ranks_train_and_save_the_bits_of_unsharded_ranks(ranks: RankPool, names: list[str]) -> None:
    of_ranks = ranks(2).run(_several, names, timeout=120)
    for cases in of_ranks:
        for name, (weights, state, _) in cases:
            assert weights, name
            assert state, name
    total = {name: sum(cases[i][1][2] for cases in of_ranks) for i, (name, _) in enumerate(of_ranks[0])}
    assert all(share <= 1.06 for share in total.values()), total  # counts of steps are on both where a cut goes through
    assert all(share < 0.6 for cases in of_ranks for _, (_, _, share) in cases)


def _in_double(name: str) -> tuple[dict[str, Tensor], float]:
    net = net_of(torch.float64)
    optimizer = OPTIMIZERS[name](groups_of(net))
    reducer = ShardedReducer(net, [optimizer], shared_memory=name == "adam", **SMALL)
    norms: list[Any] = []
    train(net, optimizer, reducer, range(5), clip=lambda: norms.append(reducer.shards.clip(optimizer, 0.05)))
    found = values(net)
    reducer.detach()
    return found, float(norms[-1])


@pytest.mark.parametrize(("world", "name"), [(1, "adam"), (2, "adam"), (3, "adam"), (4, "adam"), (3, "sgd")])
def test_any_number_of_ranks_trains_the_model_of_one_process(ranks: RankPool, world: int, name: str) -> None:
    net = net_of(torch.float64)
    optimizer = OPTIMIZERS[name](groups_of(net))
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(world):
            sometimes = step % 2 == 0 and rank % 2 == world % 2
            (net(batch_of(step, rank, torch.float64), sometimes) / world).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    for found, theirs in ranks(world).run(_in_double, name):
        assert theirs == pytest.approx(norm.item(), rel=1e-12)
        for key, value in values(net).items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-12), key


def _without_memory() -> tuple[bool, bool, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedScatter, "buffers", lambda self, sizes: None)
        patch.setattr(SharedBuffer, "lay_out", lambda self, sizes: False)
        return _both("sgd")


def test_without_memory_in_common_slices_go_through_the_group(ranks: RankPool) -> None:
    for weights, state, _ in ranks(2).run(_without_memory):
        assert weights
        assert state


# -- state ---------------------------------------------------------------------------------------------------


def _loaded(state: Any) -> tuple[Any, dict[str, Tensor]]:
    net = net_of()
    optimizer = OPTIMIZERS["adam"](groups_of(net))
    reducer = ShardedReducer(net, [optimizer], **SMALL)
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    if dist.get_world_size() == 3:  # bits after a step: those of ranks that have the same gradients
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    found = values(net)
    reducer.detach()
    return again, found


def _saved() -> Any:
    net = net_of()
    optimizer = OPTIMIZERS["adam"](groups_of(net))
    reducer = ShardedReducer(net, [optimizer], **SMALL)
    train(net, optimizer, reducer, range(3))
    on_rank_0 = reducer.shards.state_dict(optimizer, only=0)
    assert not optimizer.state[net.head.weight]  # a look at what is not there (a defaultdict) made saving fail
    everywhere = optimizer.state_dict()
    reducer.detach()
    after = optimizer.state_dict()
    reducer.shards.restore()
    restored = optimizer.state_dict()
    unsharded = "step" not in vars(optimizer) and {id(p) for p in optimizer.state} <= {id(p) for p in net.parameters()}
    return on_rank_0, everywhere, same(after, everywhere), same(restored, everywhere), unsharded


def test_a_state_dict_is_the_ordinary_one_for_any_number_of_ranks(ranks: RankPool) -> None:
    (first, state, *right), (second, same_state, *too) = ranks(2).run(_saved)
    assert right == too == [True, True, True]
    assert same(first, state)
    assert same(state, same_state)
    assert second == {"state": {}, "param_groups": state["param_groups"]}
    net = net_of()
    optimizer = OPTIMIZERS["adam"](groups_of(net))
    optimizer.load_state_dict(copy.deepcopy(state))  # by torch itself
    assert same(optimizer.state_dict(), state)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    for again, weights in ranks(3).run(_loaded, state):
        assert same(again, state)
        assert same(weights, values(net))


class _RowSums(torch.optim.SGD):
    """Claims to be elementwise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sums"] = torch.zeros(parameter.numel() + 1)
        return super().step(closure)


def _odd_state() -> str:
    elementwise(_RowSums)
    net = nn.Linear(4, 40)
    optimizer = _RowSums(net.parameters(), 0.1)
    reducer = ShardedReducer(net, [optimizer])
    train_once(net, optimizer, reducer)
    try:
        with pytest.raises(ValueError, match=r"_RowSums keeps 'sums' of shape .* not elementwise"):
            optimizer.state_dict()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(ValueError, match="another size"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        odd = {"state": {0: {"sums": torch.zeros(3)}}, "param_groups": [{"params": [0, 1]}]}
        with pytest.raises(ValueError, match=r"'sums' of shape \(3,\)"):
            optimizer.load_state_dict(odd)
    finally:
        reducer.detach()
    with pytest.raises(RuntimeError, match="detached"):
        optimizer.step()
    return "refused"


def train_once(net: nn.Module, optimizer: Any, reducer: Reducer) -> None:
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4) * (dist.get_rank() + 1)).square().mean()
    reducer.prepare()
    loss.backward()
    reducer.finish()
    optimizer.step()


def test_state_that_cannot_be_cut_or_joined_is_refused_on_all_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(_odd_state) == ["refused"] * 2


# -- gradients -----------------------------------------------------------------------------------------------


def _gradients_shown() -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 37), nn.Linear(37, 3))
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    reducer = ShardedReducer(net, [optimizer])
    plain = Reducer(twin.named_parameters(), shared_memory=False)
    for module, its in ((net, reducer), (twin, plain)):
        loss = module(torch.ones(2, 4) * (dist.get_rank() + 1)).square().mean()
        its.prepare()
        loss.backward()
        its.finish()
    grads = [parameter.grad for parameter in net.parameters()]
    assert all(
        type(grad) is SlicedGradient and grad.shape == p.shape for grad, p in zip(grads, net.parameters(), strict=True)
    )
    assert "SlicedGradient(shape=(37, 4))" in repr(grads)
    for read in (torch.clone, torch.Tensor.tolist, lambda grad: grad + 1, torch.Tensor.sum):
        with pytest.raises(RuntimeError, match="whole_gradients"):
            read(grads[0])
    with pytest.raises(RuntimeError, match="clip_gradients"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with reducer.shards.whole_gradients():
        for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
            mine.grad.mul_(2)  # type: ignore[union-attr]
        net[1].bias.grad = torch.ones(3)
        net[1].weight.grad = None
    assert type(net[1].bias.grad) is SlicedGradient
    assert net[1].weight.grad is None
    before = values(net)
    optimizer.step()
    assert torch.equal(net[1].weight, before["1.weight"])
    assert torch.equal(net[1].bias, before["1.bias"] - 0.1 * torch.ones(3))
    assert torch.allclose(net[0].weight, before["0.weight"] - 0.2 * twin[0].weight.grad)  # type: ignore[operator]
    optimizer.zero_grad(set_to_none=False)
    before = values(net)
    optimizer.step()
    assert same(values(net), before)
    net.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())
    reducer.detach()
    plain.detach()
    return "right"


def test_a_gradient_that_is_spread_cannot_be_misread(ranks: RankPool) -> None:
    assert ranks(2).run(_gradients_shown) == ["right"] * 2


def _accumulated_over_rounds() -> str:
    """Backwards that reduce, and that do not, without zero_grad in between; zeroed after that; and a new layout."""
    torch.manual_seed(0)
    net = nn.Linear(4, 50, dtype=torch.float64)
    net.bias.requires_grad_(False)
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    reducer = ShardedReducer(net, [optimizer])
    plain = Reducer(twin.named_parameters(), shared_memory=False)
    for round_, (sync, zero) in enumerate(
        [(1, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 0), (1, 0), (1, 0), (0, 1), (1, 0)]
    ):
        for module, its in ((net, reducer), (twin, plain)):
            if zero:
                module.zero_grad()
            if round_ == 7:
                module.bias.requires_grad_(True)  # type: ignore[union-attr]
            its.sync = bool(sync)
            loss = module(torch.ones(2, 4, dtype=torch.float64) * (dist.get_rank() + round_)).square().mean()
            its.prepare()
            loss.backward()
            its.finish()
        if round_ == 6:
            reducer.replan(reducer.plan()[::-1])
        if sync:
            with reducer.shards.whole_gradients():
                for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
                    assert (mine.grad is None) == (theirs.grad is None)
                    if mine.grad is not None:
                        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-13), round_  # type: ignore[arg-type]
    reducer.detach()
    plain.detach()
    return "right"


def test_rounds_without_zero_grad_add_up(ranks: RankPool) -> None:
    assert ranks(2).run(_accumulated_over_rounds) == ["right"] * 2


# -- parameters that come and go -----------------------------------------------------------------------------


def _thawed(sharded: bool, shared: bool) -> dict[str, Any]:
    """Two optimizers that take turns, one group added later, a layer thawed later."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})
    net["c"].requires_grad_(False)
    one = torch.optim.Adam(net["a"].parameters(), 0.1)
    two = torch.optim.Adam([*net["b"].parameters(), *net["c"].parameters()], 0.1, weight_decay=0.1)
    if sharded:
        reducer: Reducer = ShardedReducer(net, [one, two], shared_memory=shared, **SMALL)
    else:
        reducer = Reducer(net.named_parameters(), shared_memory=False, **SMALL)
    plans = [reducer.plan()]
    for step in range(8):
        if step == 3:
            net["c"].requires_grad_(True)
        if step == 5:
            two.add_param_group({"params": net["d"].parameters(), "lr": 0.2})
        optimizer, other = (one, two) if step % 2 else (two, one)
        for group in other.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(False)
        x = torch.ones(2, 4) * (dist.get_rank() + 1)
        for name in "abcd":
            x = net[name](x)
        reducer.prepare()
        x.square().mean().backward()
        reducer.finish()
        plans += [reducer.plan()] if reducer.plan() != plans[-1] else []
        optimizer.step()
        net.zero_grad()
        for group in other.param_groups:
            for parameter in group["params"]:
                parameter.requires_grad_(step > 2 or all(parameter is not frozen for frozen in net["c"].parameters()))
    state = {
        f"{i} {j} {key}": v
        for i, o in enumerate((one, two))
        for j, s in o.state_dict()["state"].items()
        for key, v in s.items()
    }
    found = {**values(net), **state, "plans": plans}
    reducer.detach()
    return found


def _thawed_all() -> list[dict[str, Any]]:
    return [_thawed(True, True), _thawed(True, False), _thawed(False, False)]


def test_several_optimizers_toggled_thawed_and_extended_keep_their_bits(ranks: RankPool) -> None:
    for mine, too, theirs in ranks(2).run(_thawed_all):
        assert same(mine, theirs)
        assert same(too, theirs)
        assert len(mine["plans"]) <= 3, mine["plans"]  # taking turns does not lay out anew


def _waited_for() -> str:
    torch.manual_seed(0)
    net = net_of()
    optimizer = torch.optim.SGD(groups_of(net), 0.1)
    reducer = ShardedReducer(net, [optimizer], **SMALL)
    under_way = reducer.shards._under_way
    train(net, optimizer, reducer, range(2))
    count = len(reducer.shards._flats)
    assert count > 3
    assert len(under_way) == count  # nobody has looked since the step
    weight = net.head.weight
    assert len(under_way) < count
    optimizer.zero_grad()
    assert 0 < len(under_way) < count
    first = optimizer.param_groups[0]["params"][0]
    assert not any(shard.parameter is first for flat in under_way for shard in flat.shards)
    assert len(list(optimizer.param_groups[1]["params"])) > 3
    assert not any(shard.parameter.dim() < 2 for flat in under_way for shard in flat.shards)
    train(net, optimizer, reducer, range(2, 3))
    assert same(dict(copy.deepcopy(net).named_parameters()), dict(net.named_parameters()))
    assert not under_way
    assert type(copy.deepcopy(net).head._parameters) is dict
    train(net, optimizer, reducer, range(3, 4))
    state = net.state_dict()
    assert not under_way
    assert len({tuple(t.tolist()) for t in _everywhere(state["head.weight"].sum().view(1))}) == 1
    pickled = pickle.loads(pickle.dumps(net.head))
    assert torch.equal(pickled.weight, net.head.weight)
    net.head.weight.data = net.head.weight.data.clone().mul_(2)  # memory of its own
    net.head.weight.grad = torch.ones_like(net.head.weight)
    expected = net.head.weight - 0.1 * (1 + 0.01 * net.head.weight)
    optimizer.step()
    assert torch.allclose(net.head.weight, expected)
    loss = (net.head.weight * net.head.weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    reducer.shards.wait()
    net.head.weight.data = net.head.weight.data.double()
    with pytest.raises(RuntimeError, match="convert and move the module before"):
        optimizer.step()
    net.head.weight.data = net.head.weight.data.float()
    reducer.detach()
    assert type(net._parameters) is type(optimizer.param_groups[0]) is dict
    assert type(optimizer.param_groups[0]["params"]) is list
    assert not net._forward_pre_hooks
    assert weight is net.head.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
    return "right"


def _everywhere(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def test_whoever_reads_a_parameter_waits_for_it(ranks: RankPool) -> None:
    assert ranks(2).run(_waited_for) == ["right"] * 2


# -- loops of other kinds ------------------------------------------------------------------------------------


def _container(sharded: bool, static: bool) -> dict[str, Tensor]:
    """A hand-written loop with closures, and a scheduler that is made after the sharding."""
    net = net_of()
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL["bucket_cap_mb"], static_graph=static, shared_memory=False)
    optimizer = torch.optim.AdamW(groups_of(net), 0.01)
    if sharded:
        shards = shard_optimizers(model, optimizer)
        assert model.reducer.shards is shards  # type: ignore[attr-defined]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch_of(step, dist.get_rank()), True)
        loss.backward()
        return loss

    for step in range(5):  # noqa: B007  # the closure has it
        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor)
        scheduler.step()
    found = values(net)
    model.reducer.detach()
    return found


def _containers() -> list[bool]:
    return [same(_container(True, static), _container(False, static)) for static in (False, True)]


def test_a_hand_written_loop_keeps_its_bits(ranks: RankPool) -> None:
    assert ranks(2).run(_containers) == [[True, True]] * 2


class _Twice(torch.optim.SGD):
    """A subclass's step has hooks of its own around those of its base."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


def _with_hooks(sharded: bool, kind: Any) -> tuple[list[Any], dict[str, Tensor]]:
    elementwise(_Twice)
    net = net_of()
    optimizer = kind(net.parameters(), 0.1)
    if sharded:
        reducer: Reducer = ShardedReducer(net, [optimizer], shared_memory=False, **SMALL)
    else:
        reducer = Reducer(net.named_parameters(), shared_memory=False, **SMALL)
    average = {name: value.clone() for name, value in values(net).items()}
    seen: list[Any] = [average]

    def before(*_: Any) -> None:
        seen.append([p is q for p, q in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True)])

    def project(*_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(0.5 / parameter.norm().clamp(min=0.5))

    def follow(*_: Any) -> None:
        for name, parameter in net.named_parameters():
            average[name].lerp_(parameter.detach(), 0.5)

    for hook in (project, follow):
        optimizer.register_step_post_hook(hook)
    optimizer.register_step_pre_hook(before)
    train(net, optimizer, reducer, range(3))
    found = seen, values(net)
    reducer.detach()
    return found


def _both_with_hooks() -> list[bool]:
    return [same(_with_hooks(True, kind), _with_hooks(False, kind)) for kind in (torch.optim.SGD, torch.optim.Adam)]


def test_hooks_of_an_optimizer_see_whole_parameters(ranks: RankPool) -> None:
    """A hook after the step had the new values of this rank's slices alone, and groups of fragments."""
    assert ranks(2).run(_both_with_hooks) == [[True, True]] * 2


def _step_that_calls_a_step() -> bool:
    found = []
    for sharded in (True, False):
        net = net_of()
        optimizer = elementwise(_Twice)(net.parameters(), 0.1, momentum=0.5)
        kind = partial(ShardedReducer, net, [optimizer]) if sharded else partial(Reducer, net.named_parameters())
        reducer = kind(shared_memory=False, **SMALL)
        train(net, optimizer, reducer, range(2))
        found.append(values(net))
        reducer.detach()
    return same(*found)


def test_a_step_that_calls_that_of_its_base_is_sharded_as_a_whole(ranks: RankPool) -> None:
    assert ranks(2).run(_step_that_calls_a_step) == [True] * 2


def _cast_and_moved() -> str:
    net = net_of()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    shard_optimizers(model, optimizer)
    model(batch_of(0, dist.get_rank())).backward()
    net.to("cpu").float()  # nothing, as some loops have it in every epoch
    assert net.scale.grad is not None
    with pytest.raises(RuntimeError, match="zero_grad"):
        net.scale.grad.double()
    optimizer.step()
    optimizer.zero_grad()
    model.double()
    model(batch_of(1, dist.get_rank(), torch.float64)).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert {value["exp_avg"].dtype for value in state.values()} == {torch.float64}
    with pytest.raises(RuntimeError, match=r"weight\(0\)"), model.join():
        pass
    model.reducer.detach()
    return "right"


def test_a_module_is_cast_and_moved_as_without_sharding(ranks: RankPool) -> None:
    """``module.to(device)`` where it already is was an error while gradients were spread; ``join()`` hung."""
    assert ranks(2).run(_cast_and_moved) == ["right"] * 2


def _wide_state() -> set[torch.dtype]:
    net = net_of(torch.bfloat16)
    net.first.requires_grad_(False)
    optimizer = torch.optim.NAdam(net.parameters(), 0.01)  # has a product of betas in float32
    reducer = ShardedReducer(net, [optimizer], **SMALL)
    train(net, optimizer, reducer, range(2))
    net.first.requires_grad_(True)
    train(net, optimizer, reducer, range(2, 4))
    found = {state["mu_product"].dtype for state in optimizer.state.values()}
    reducer.detach()
    reducer.shards.restore()
    return found | {state["mu_product"].dtype for state in optimizer.state.values()}


def test_another_layout_does_not_round_state(ranks: RankPool) -> None:
    """A parameter that thawed had the others' state loaded anew, which casts it to their dtype."""
    assert ranks(2).run(_wide_state) == [{torch.float32}] * 2


def _norm_with_a_foreign_gradient() -> tuple[float, float]:
    net = net_of()
    foreign = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([*net.parameters(), foreign], 0.1)
    reducer = ShardedReducer(net, [optimizer], **SMALL)
    reducer.prepare()
    net(batch_of(0, dist.get_rank())).backward()
    reducer.finish()
    without = reducer.shards.clip(optimizer, 1e9)
    foreign.grad = torch.full((5,), 3.0)  # alike on all ranks
    total = reducer.shards.clip(optimizer, 1e9)
    reducer.detach()
    assert isinstance(without, Tensor)
    assert isinstance(total, Tensor)
    return total.item(), (without.square() + 45).sqrt().item()


def test_a_gradient_that_every_rank_has_counts_once_in_the_norm(ranks: RankPool) -> None:
    """One of a parameter that is no part of the module counted once for each rank."""
    for total, expected in ranks(2).run(_norm_with_a_foreign_gradient):
        assert total == pytest.approx(expected, rel=1e-6)


def _other_dtypes(sharded: bool, shared: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Module()
    net.wide = nn.Parameter(torch.randn(70, dtype=torch.float64))
    net.short = nn.Parameter(torch.randn(9, 9).bfloat16())
    net.both = nn.Parameter(torch.randn(30, 3, dtype=torch.complex64))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    if sharded:
        reducer: Reducer = ShardedReducer(net, [optimizer], shared_memory=shared)
    else:
        reducer = Reducer(net.named_parameters(), shared_memory=False)
    for step in range(4):
        optimizer.zero_grad()
        reducer.prepare()
        scale = 1 + step + dist.get_rank()
        sum((p.abs() * scale).square().sum().double() for p in net.parameters()).backward()  # type: ignore[union-attr]
        reducer.finish()
        optimizer.step()
    found = {**values(net), **{str(k): v for k, s in optimizer.state_dict()["state"].items() for v in s.values()}}
    reducer.detach()
    return found


def _both_other_dtypes() -> bool:
    plain = _other_dtypes(False)
    return same(_other_dtypes(True), plain) and same(_other_dtypes(True, True), plain)


def test_complex_and_16_bit_parameters_keep_their_bits(ranks: RankPool) -> None:
    assert ranks(2).run(_both_other_dtypes) == [True] * 2


def _scaled() -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 40)
    twin = copy.deepcopy(net)
    optimizer, other = (torch.optim.SGD(module.parameters(), 0.1) for module in (net, twin))
    reducer = ShardedReducer(net, [optimizer])
    scaler = LossScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaler.unscale_gradients = reducer.shards.unscale
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.ones(2, 4) * (step + 1 + dist.get_rank())
        loss = net(x)[:, :2].square().mean()
        if step == 1:  # only the gradient of the first rows overflows, which lie in the slice of rank 0
            loss = loss * torch.inf
        reducer.prepare()
        scaler.scale(loss).backward()
        reducer.finish()
        scaler.unscale(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        other.zero_grad()
        loss = sum(twin(torch.ones(2, 4) * (step + 1 + r))[:, :2].square().mean() / 2 for r in range(2))
        plain.scale(loss * torch.inf if step == 1 else loss).backward()  # type: ignore[operator]
        plain.step(other)
        plain.update()
        assert plain.get_scale() == scales[-1]
        assert all(torch.allclose(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    found = values(net)
    reducer.detach()
    return scales, found


def test_all_ranks_leave_out_a_step_whose_gradient_overflowed_in_one_slice(ranks: RankPool) -> None:
    first, second = ranks(2).run(_scaled)
    assert same(first, second)
    assert first[0][1] < first[0][0]


# -- refusals ------------------------------------------------------------------------------------------------


class _Same(torch.optim.Adam):
    """Another constructor, the same update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


class _Other(torch.optim.Adam):
    """Another update."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.LBFGS, "LBFGS: its line search"),
        (torch.optim.Adafactor, "Adafactor: it keeps row"),
        (torch.optim.SparseAdam, "SparseAdam: it updates the rows"),
        (torch.optim.Muon, "Muon: it orthogonalises"),
        (_Other, "_Other: it is not known .*optimizers.elementwise`"),
        (lambda p: torch.optim.Adam(p, differentiable=True), r"Adam\(differentiable=True\)"),
    ],
)
def test_optimizers_that_need_whole_parameters_are_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_elementwise([make([nn.Parameter(torch.ones(2, 2))])])
    with pytest.raises(ValueError, match=name):
        ShardedReducer(net := nn.Linear(2, 2, bias=False), [make(net.parameters())])


def test_a_subclass_with_the_same_update_and_a_declared_one_are_taken() -> None:
    @elementwise
    class Declared(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    check_elementwise([_Same([weight]), Declared([weight], 0.1)])


def _refused() -> str:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="gradient_as_bucket_view=False"):
        ShardedReducer(net, [optimizer], gradient_as_bucket_view=False)
    with pytest.raises(ValueError, match="sparse gradients, as those of"):
        ShardedReducer(net, [optimizer], sparse=["weight"])
    with pytest.raises(ValueError, match="check_reduction"):
        shard_optimizers(DistributedDataParallel(net, check_reduction=True), optimizer)
    with pytest.raises(ValueError, match="gradient_as_bucket_view"):
        shard_optimizers(DistributedDataParallel(net, gradient_as_bucket_view=False), optimizer)
    low = _MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mixed_precision: .* torch\.autocast"):
        shard_optimizers(DistributedDataParallel(copy.deepcopy(net), mixed_precision=low), optimizer)
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="a communication hook"):
        shard_optimizers(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()  # as before
    optimizer.step()
    optimizer.zero_grad()
    reducer = ShardedReducer(net, [optimizer])
    with pytest.raises(RuntimeError, match="communication hook"):
        reducer.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match="sharded already"):
        ShardedReducer(net, [optimizer])
    reducer.detach()
    ShardedReducer(net, [optimizer]).detach()
    return "refused"


def test_what_does_not_go_together_is_refused(ranks: RankPool) -> None:
    assert ranks(2).run(_refused) == ["refused"] * 2


class Shares(nn.Module):
    """Two parameters in one memory, as ``one.data = other.data`` leaves them."""

    def __init__(self, rows: int = 3) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(3, 5).double(), nn.Linear(3, rows).double()
        self.second.weight.data = self.first.weight.data[:rows]

    def forward(self, batch: Tensor) -> Tensor:
        return self.first(batch).square().mean() + self.second(batch).sin().mean()


@pytest.mark.parametrize("frozen", ["neither", "first", "second"])
def test_parameters_in_one_memory_stay_there(ranks: RankPool, frozen: str) -> None:
    """Each was moved to a buffer of its own, and they went different ways without a word; a frozen one stayed."""

    def shares() -> Shares:
        net = Shares(5)
        if frozen != "neither":
            getattr(net, frozen).weight.requires_grad_(False)
        return net

    def train_shared() -> tuple[Any, ...]:
        net = shares()
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        model = DistributedDataParallel(net)
        shards = shard_optimizers(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            model(batch_of(step, dist.get_rank(), torch.float64)[:, 0, :3]).backward()
            optimizer.step()
        shards.detach()
        assert net.first.weight.data_ptr() == net.second.weight.data_ptr()
        return [value.tolist() for value in values(net).values()], shards.state_dict(optimizer)["state"]

    net = shares()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (net(batch_of(step, rank, torch.float64)[:, 0, :3]) / 2).backward()
        optimizer.step()
    for found, state in ranks(2).run(train_shared):
        assert found == [value.tolist() for value in values(net).values()]
        assert same(state, optimizer.state_dict()["state"])


def test_parameters_with_a_part_of_their_memory_in_common_are_refused(ranks: RankPool) -> None:
    def train_partly() -> None:
        model = DistributedDataParallel(Shares(3))
        shard_optimizers(model, torch.optim.Adam(model.parameters()))

    with pytest.raises(RankFailure, match=r"'first.weight' and 'second.weight' have memory in common"):
        ranks(2).run(train_partly)


def test_a_buffer_in_a_parameter_s_memory_is_refused(ranks: RankPool) -> None:
    """The parameter was moved, and the buffer kept its first values."""

    def train_with_buffer() -> None:
        net = nn.Linear(3, 2)
        net.register_buffer("seen", net.weight.data[0])
        model = DistributedDataParallel(net)
        shard_optimizers(model, torch.optim.Adam(model.parameters()))

    with pytest.raises(RankFailure, match=r"'seen' and 'weight' have memory in common"):
        ranks(2).run(train_with_buffer)
