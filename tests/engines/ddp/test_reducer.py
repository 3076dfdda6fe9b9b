"""The reducer against one process: values, bits, unused parameters, accumulation, empty shares, overlap."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.engines.ddp import bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.ground.rank import forget_warnings
from tests.engines.ddp.rounds import assert_close, reduced
from tests.tools.pool import RankPool

Gradients = list[Tensor | None]
STEPS = 3  # the first one learns that nothing nests, so buckets travel early only from the second on
SHAPES = [(), (1,), (3,), (2, 3), (0, 2), (7,), (4, 4), (1, 1, 5)]


@dataclass
class Case:
    """What every rank does in every micro-batch, decided here, so that one process can do the same."""

    shapes: list[tuple[int, ...]]
    world: int
    micro: int  # micro-batches of a window
    used: list[list[list[set[int]]]]  # [step][rank][micro-batch] -> parameters in the loss
    zero_weight: list[list[list[bool]]]
    cap: float  # bytes
    large: int  # elements from which on gradients are multiplied on their way into the buffer
    shared: bool  # memory, or TCP
    views: bool
    set_to_none: bool

    def parameters(self) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in self.shapes]

    def loss(self, parameters: list[nn.Parameter], step: int, rank: int, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + micro + self.micro * (rank + self.world * step))
        loss = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1.0
        for index, parameter in enumerate(parameters):
            noise = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            if index in self.used[step][rank][micro]:
                loss = loss + (parameter * noise).sin().sum()
        return loss


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6))
    world, micro = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    everything = set(range(len(shapes)))
    some = st.one_of(st.just(everything), st.sets(st.sampled_from(sorted(everything))))
    of_ranks = st.lists(st.lists(some, min_size=micro, max_size=micro), min_size=world, max_size=world)
    rarely = st.sampled_from([False, False, False, True])
    mutes = st.lists(st.lists(rarely, min_size=micro, max_size=micro), min_size=world, max_size=world)
    return Case(
        shapes,
        world,
        micro,
        [draw(of_ranks) for _ in range(STEPS)],
        [draw(mutes) for _ in range(STEPS)],
        draw(st.sampled_from([1.0, 40.0, 100.0, 1e6])),
        draw(st.sampled_from([0, 4, 100])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def _on_rank(case: Case) -> tuple[list[Gradients], int, int]:
    with patch.object(bucket, "LARGE", case.large):
        return _trained(case)


def _trained(case: Case) -> tuple[list[Gradients], int, int]:
    rank = dist.get_rank()
    parameters = case.parameters()
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    cap = case.cap / 2**20
    reducer = Reducer(
        named, bucket_cap_mb=cap, first_bucket_mb=cap, gradient_as_bucket_view=case.views, shared_memory=case.shared
    )
    optimizer = torch.optim.SGD(parameters, 0.1)
    found: list[Gradients] = []
    for step in range(STEPS):
        for micro in range(case.micro):
            reducer.sync = micro + 1 == case.micro
            loss = case.loss(parameters, step, rank, micro)
            if micro == 0:
                optimizer.zero_grad(set_to_none=case.set_to_none)
            reducer.zero_weight = case.zero_weight[step][rank][micro]
            reducer.prepare()
            loss.backward()
            reducer.finish()
            assert not reducer.zero_weight
        found.append([None if p.grad is None else p.grad.clone() for p in parameters])
        optimizer.step()
    return found, reducer.rounds, reducer.collectives


def _in_one_process(case: Case) -> list[Gradients]:
    parameters = case.parameters()
    optimizer = torch.optim.SGD(parameters, 0.1)
    found: list[Gradients] = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for rank in range(case.world):
            for micro in range(case.micro):
                if not case.zero_weight[step][rank][micro]:
                    (case.loss(parameters, step, rank, micro) / case.world).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in parameters])
        optimizer.step()
    return found


@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process(ranks: RankPool, examples: int) -> None:
    settings(max_examples=examples)(given(case=cases())(lambda case: compare(ranks, case)))()


def compare(ranks: RankPool, case: Case) -> None:
    expected = _in_one_process(case)
    results = ranks(case.world).run(_on_rank, case)
    for found, rounds, collectives in results:
        assert (rounds, collectives) == (STEPS, results[0][2])
        assert_close(found, expected)
        for mine, first in zip(found, results[0][0], strict=True):  # bitwise the same on all ranks
            assert all(one is other or torch.equal(one, other) for one, other in zip(mine, first, strict=True))  # type: ignore[arg-type]


class Net(nn.Module):
    """Convolution, embedding and linear layers, of which some are used only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.extra = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        hidden = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
        if extra:
            hidden = hidden + self.extra(hidden)
        return self.head(self.body(hidden))


def _net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def _tokens(step: int, rank: int) -> Tensor:
    return torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(net: nn.Module, step: int, rank: int) -> Tensor:
    tokens = _tokens(step, rank)
    logits = net(tokens, extra=(step + rank) % 3 == 0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1).flatten())


def _against_torch(cap: float, views: bool) -> list[list[Tensor]]:
    rank = dist.get_rank()
    ours, theirs = _net(), _net()
    reducer = Reducer(ours.named_parameters(), bucket_cap_mb=cap, gradient_as_bucket_view=views)
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    # a zero in place of None would decay `never`
    mine, torchs = (torch.optim.AdamW(net.parameters(), 1e-2) for net in (ours, theirs))
    for step in range(4):
        mine.zero_grad()
        torchs.zero_grad()
        reduced(reducer, _loss(ours, step, rank))
        _loss(wrapped, step, rank).backward()
        mine.step()
        torchs.step()
    return [[parameter.detach() for parameter in net.parameters()] for net in (ours, theirs)]


@pytest.mark.everyday
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("cap", [0.0005, 25])
def test_two_ranks_have_the_bits_of_torch_and_of_accumulation(ranks: RankPool, cap: float, views: bool) -> None:
    alone = _net()
    optimizer = torch.optim.AdamW(alone.parameters(), 1e-2)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(2):
            (_loss(alone, step, rank) * 0.5).backward()
        optimizer.step()
    for ours, theirs in ranks(2).run(_against_torch, cap, views):
        for mine, torchs, accumulated in zip(ours, theirs, alone.parameters(), strict=True):
            assert torch.equal(mine, torchs)
            assert torch.equal(mine, accumulated)


def _negative_zero(used_on: list[int]) -> Tensor:
    parameter, *others = (nn.Parameter(torch.ones(n)) for n in (2, 4096, 2))
    reducer = Reducer([("p", parameter), *((str(i), other) for i, other in enumerate(others))])
    used = parameter if dist.get_rank() in used_on else others[1]
    reduced(reducer, (used * torch.tensor([-0.0, 0.0])).sum())
    assert parameter.grad is not None
    return parameter.grad.signbit()


@pytest.mark.parametrize("used_on", [[0, 1], [1]])
def test_a_negative_zero_stays_one(ranks: RankPool, used_on: list[int]) -> None:
    """Also where a rank has no gradient to add."""
    for signs in ranks(2).run(_negative_zero, used_on):
        assert signs.tolist() == [True, False]


def _early(steps: int) -> list[int]:
    """How many buckets are under way when the first layer gets its gradient, and when backward has ended."""
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.0003, first_bucket_mb=0.0003)
    found: list[int] = []
    net[0].weight.register_hook(lambda grad: found.append(reducer.collectives))
    for _ in range(steps):
        before = reducer.collectives
        reducer.prepare()
        net(torch.randn(2, 8)).sum().backward()
        found[-1] -= before
        found.append(reducer.collectives - before)
        reducer.finish()
        found.append(reducer.collectives - before)
    return found


def test_buckets_travel_while_backward_runs(ranks: RankPool) -> None:
    for found in ranks(2).run(_early, 3):
        total = found[2]
        assert total == 6
        assert found[:2] == [0, 0]  # the first round watches whether backwards nest
        for step in (1, 2):
            assert found[3 * step] >= total - 1
            assert found[3 * step + 1] == total


def _infinite_share() -> list[Tensor]:
    """Rank 1 runs on a borrowed sample with an infinite gradient; what it accumulated before counts."""
    parameter, borrowed = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    reducer = Reducer([("p", parameter), ("only by the borrowed sample", borrowed)])
    grads = []
    for accumulated in (False, True):
        parameter.grad = None
        if accumulated:
            reducer.sync = False
            reduced(reducer, (parameter * 10).sum())
        reducer.sync = True
        reducer.zero_weight = dist.get_rank() == 1
        loss = (parameter * (torch.inf if reducer.zero_weight else 2.0)).sum()
        reduced(reducer, loss + borrowed.sum() if reducer.zero_weight else loss)
        assert parameter.grad is not None
        assert borrowed.grad is None
        grads.append(parameter.grad.clone())
    return grads


def test_an_empty_share_is_set_to_nothing_not_multiplied(ranks: RankPool) -> None:
    for first, second in ranks(2).run(_infinite_share):
        assert first.tolist() == [1.0] * 3
        assert second.tolist() == [11.0] * 3


def test_one_rank_is_left_alone() -> None:
    net = _net()
    reducer = Reducer(net.named_parameters())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    kept = torch.ones_like(net.conv.weight)
    net.conv.weight.grad = kept
    reduced(reducer, _loss(net, 0, 0))
    assert net.conv.weight.grad is kept
    assert net.never.weight.grad is None
    before = kept.clone()
    reducer.zero_weight = True
    reduced(reducer, _loss(net, 1, 0))
    assert torch.equal(kept, before)
    assert net.conv.weight.grad is kept
    assert net.never.weight.grad is None
    assert (reducer.rounds, reducer.collectives, reducer.zero_weight) == (2, 0, False)
    assert [name for bucket in reducer.plan() for name in bucket][-1] == "embed.weight"


def _attached() -> list[bool]:
    net = _net()
    reducer = Reducer(net.named_parameters())
    twin = copy.deepcopy(net)
    reduced(reducer, _loss(net, 0, 0))
    again = copy.deepcopy(net)
    reducer.detach()
    rounds = reducer.collectives
    reduced(reducer, _loss(net, 0, dist.get_rank()))
    return [
        not any(p._post_accumulate_grad_hooks for module in (net, twin, again) for p in module.parameters()),
        set(net.state_dict()) == set(_net().state_dict()),
        reducer.collectives == rounds,
    ]


def test_the_module_is_not_changed(ranks: RankPool) -> None:
    assert ranks(2).run(_attached) == [[True] * 3] * 2


def test_a_lazy_module_is_named() -> None:
    with pytest.raises(ValueError, match=r"'weight' belongs to a lazy module"):
        Reducer(nn.LazyLinear(3).named_parameters())
    with pytest.raises(ValueError, match="bucket_cap_mb=0"):
        Reducer([], bucket_cap_mb=0)


# -- gradients that the user keeps -----------------------------------------------------------------------------


def _layers() -> nn.Module:
    torch.manual_seed(5)
    first = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(first, nn.Flatten(), nn.Linear(12, 4)).double()


def _two_losses(net: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    out = net(torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=generator))
    return out.square().mean(), out.sin().sum()


def _projected(settings: dict[str, bool]) -> tuple[list[list[float]], list[int]]:
    """Each step takes the difference of two losses' gradients, and that of the step before, all of them kept."""
    net, rank = _layers(), dist.get_rank()
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.0005, first_bucket_mb=0.0005, **settings)
    parameters = list(net.parameters())
    kept: list[Tensor] = []
    weights = []
    for step in range(5):
        found = []
        for loss in _two_losses(net, step, rank):
            net.zero_grad()
            reduced(reducer, loss, retain_graph=True)
            found.append([p.grad for p in parameters])
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                first, second = (gradients[index] for gradients in found)
                parameter -= 0.1 * (first - 0.5 * second + (0.25 * kept[index] if kept else 0.0))
        kept = found[0]
        weights.append([value for parameter in parameters for value in parameter.flatten().tolist()])
    return weights, [p.grad is not None and p.grad.stride() == p.stride() for p in parameters]


def _projected_alone() -> list[list[float]]:
    net = _layers()
    parameters = list(net.parameters())
    kept: list[Tensor] = []
    weights = []
    for step in range(5):
        of_ranks = [_two_losses(net, step, rank) for rank in range(2)]
        losses = [(one + other) / 2 for one, other in zip(*of_ranks, strict=True)]
        first, second = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses)
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                parameter -= 0.1 * (first[index] - 0.5 * second[index] + (0.25 * kept[index] if kept else 0.0))
        kept = list(first)
        weights.append([value for parameter in parameters for value in parameter.flatten().tolist()])
    return weights


@pytest.mark.parametrize(
    "settings", [{}, {"shared_memory": False}, {"static_graph": True}, {"gradient_as_bucket_view": False}], ids=str
)
def test_gradients_that_are_kept_outlive_the_next_backward(ranks: RankPool, settings: dict[str, bool]) -> None:
    """``kept = p.grad`` lay in the bucket, and the next backward wrote over it in silence."""
    alone = torch.tensor(_projected_alone(), dtype=torch.float64)
    for weights, fits in ranks(2).run(_projected, settings):
        torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), alone, rtol=1e-12, atol=1e-12)
        assert all(fits)


def _copied(keep: str) -> tuple[int, list[str]]:
    """(new views in the later steps, warnings) of a loop that keeps something of the gradients."""
    forget_warnings()  # an earlier call in this process of the pool may have been told
    net = _layers()
    reducer = Reducer(net.named_parameters())
    kept: list[list[Tensor]] = []
    made: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            before = [id(view) for buck in reducer.buckets for view in buck.views]
            net.zero_grad()
            reduced(reducer, _two_losses(net, step, 0)[0])
            made.append(sum(id(view) not in before for buck in reducer.buckets for view in buck.views))
            if keep == "gradient":
                kept[:] = [[p.grad for p in net.parameters() if p.grad is not None]]
            elif keep == "alias":
                kept[:] = [[p.grad.detach() for p in net.parameters() if p.grad is not None]]
    return sum(made[2:]), [str(one.message) for one in caught]


@pytest.mark.parametrize(("keep", "new", "told"), [("nothing", 0, 0), ("gradient", 12, 0), ("alias", 0, 1)])
def test_only_gradients_that_are_kept_are_copied(ranks: RankPool, keep: str, new: int, told: int) -> None:
    found = ranks(2).run(_copied, keep)
    assert [made for made, _ in found] == [new, new]
    _, said = found[0]  # the other rank says it only where no Trainer has told it its number
    assert len(said) == told
    assert all("p.grad.clone()" in one for one in said)
