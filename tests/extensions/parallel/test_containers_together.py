"""Containers whose ranks are not where the others are; how they start alike, and what cannot be wrapped."""

from __future__ import annotations

import re
import time
import warnings
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel import absent_ranks
from lockstep.extensions.parallel.absent_ranks import named_failure
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.extensions.parallel.wrapping import find_cast, find_unusable
from tests.extensions.parallel.nets import batch_of, make_net
from tests.tools.pool import RankPool

# -- ranks that are not where the others are -----------------------------------------------------------------


# -- a loss that depends on no output


def _skipping(how: str, static: bool = False) -> tuple[list[Tensor], list[str]]:
    """In every second step rank 1 has nothing to learn from its outputs."""
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0002, static_graph=static)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad()
            output = model(batch_of(step, dist.get_rank()))
            if step % 2 and dist.get_rank() == 1:
                if how == "skip_backward":
                    model.skip_backward()
                elif how == "another loss":
                    torch.ones(2, requires_grad=True).sum().backward()
                elif how == "zero":
                    (0 * output.sum()).backward()
            else:
                output.square().mean().backward()
            optimizer.step()
    said = [str(warning.message) for warning in caught if "an optimizer steps" in str(warning.message)]
    return [p.detach().clone() for p in net.parameters()], said


def _without_rank_one() -> list[Tensor]:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            if not (step % 2 and rank == 1):
                (net(batch_of(step, rank)).square().mean() / 2).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("how", ["skip_backward", "another loss", "nothing", "zero"])
def test_a_loss_that_depends_on_no_output_does_not_hang_the_others(ranks: RankPool, how: str) -> None:
    expected = _without_rank_one()
    for rank, (found, said) in enumerate(ranks(2).run(_skipping, how)):
        for mine, right in zip(found, expected, strict=True):
            assert (mine - right).abs().max() <= 1e-12 * right.abs().max()
        late = rank == 1 and how in ("another loss", "nothing")
        assert len(said) == late
        if late:
            assert said[0].startswith("rank 1: an optimizer steps, but no backward has reached the outputs")


def _looking() -> tuple[int, int]:
    """Forwards that need no backward: one that only looks, one of another net, one in eval mode."""
    net, other = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    other(batch_of(0, 0))
    for step in range(2):
        net(batch_of(step, 0)).sum().backward()
        with torch.no_grad():
            net(batch_of(step, 1))
        net.eval()
        net(batch_of(step, 1))
        net.train()
        optimizer.step()
    return net.reducer.rounds, other.reducer.rounds


def test_a_forward_without_a_backward_costs_no_round(ranks: RankPool) -> None:
    assert ranks(2).run(_looking) == [(2, 0)] * 2


# -- check_reduction


def _checked(fault: str) -> str:
    net = make_net()
    model = DistributedDataParallel(net, check_reduction=True, bucket_cap_mb=0.0001)
    odd = dist.get_rank() == 1
    try:
        for step in range(4):
            net.zero_grad()
            output = model(batch_of(step, dist.get_rank()))
            if fault == "skipped" and odd and step == 1:
                continue
            if fault == "raised" and step == 1:
                net[0].bias.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    output.square().mean().backward()
                continue
            output.square().mean().backward()
            if fault == "altered" and odd and step == 1:
                with torch.no_grad():
                    net[2].bias.grad.add_(1e-9)  # type: ignore
                    model._checks.remember()  # type: ignore
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        (
            "skipped",
            "rank 0 starts a backward, rank 1 starts a forward. On rank 1 no backward has reached the outputs ",
        ),
        ("altered", "rank 1 had a gradient of parameter '2.bias'"),
        ("raised", "rank 0 did not reduce the gradient of parameter '"),
    ],
)
def test_check_reduction_names_the_rank_that_strays(ranks: RankPool, fault: str, said: str) -> None:
    start = time.monotonic()
    first, second = ranks(2).run(_checked, fault)
    assert time.monotonic() - start < 30
    assert first == second
    assert said in first
    assert bool(first) == bool(fault)


# -- ranks that are gone


def _leaving(shared: bool) -> str:
    """Rank 1 ends its part after its first step: closes its memory, or comes to no collective any more."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = DistributedDataParallel(make_net(), process_group=group, shared_memory=shared)
    for step in range(3):
        if step and dist.get_rank() == 1:
            model.reducer.detach()
            return ""
        try:
            with patch.object(absent_ranks, "PATIENCE", 1.0):  # the seconds that a rank waits for what the others say
                model(batch_of(step, dist.get_rank())).square().mean().backward()
        except RuntimeError as error:
            return str(error)
    return "nobody left"


@pytest.mark.parametrize("shared", [False, True], ids=["over TCP", "shared memory"])
def test_a_rank_that_leaves_early_is_named_by_the_others(ranks: RankPool, shared: bool) -> None:
    said = ranks(3).run(_leaving, shared)
    for rank in (0, 2):
        assert said[rank].startswith(f"rank {rank}, averaging the gradients of round 2: rank 1 is missing")


def _failing(how: str) -> str:
    """Rank 1 makes a mistake in its second step, and raises; gives what this rank raises."""
    odd = dist.get_rank() == 1
    net = make_net()
    net.add_module("left", nn.Linear(2, 2).double())
    model = DistributedDataParallel(net, process_group=dist.new_group())
    try:
        for step in range(3):
            model.zero_grad()
            wrong = odd and step == 1
            if wrong and how == "added":
                net.register_parameter("left_over", nn.Parameter(torch.ones(1)))
            elif wrong and how == "cast":
                net.float()
            batch = batch_of(step, dist.get_rank()).to(net[0].weight.dtype)  # type: ignore[arg-type]
            model(batch[:, :3] if wrong and how == "forward" else batch).square().mean().backward()
    except (RuntimeError, ValueError) as error:
        model.reducer.detach()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("added", "MisconfigurationException: rank 1: parameter 'left_over' was added to the model"),
        ("cast", "MisconfigurationException: rank 1: parameter 'left.bias' is torch.float32 of shape (2,)"),
        ("forward", "RuntimeError: "),  # what torch says of shapes differs between its releases
    ],
)
def test_what_one_rank_raises_is_told_by_the_others(ranks: RankPool, how: str, said: str) -> None:
    """They said that it was gone, failed, or elsewhere in its program."""
    first, second = ranks(2).run(_failing, how)
    assert first.startswith(f"rank 0, averaging the gradients of round 2: rank 1 is missing: it raised {said}")
    assert second in first


def _named(text: str) -> bool:
    def fail() -> None:
        with named_failure(dist.new_group(), "averaging the gradients", 1):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError) as raised:
        fail()
    return str(raised.value) == text


def test_a_parameter_called_left_is_no_lost_rank(ranks: RankPool) -> None:
    """Its name in an error was taken for the news of a rank that has gone."""
    assert ranks(2).run(_named, "parameter 'left.weight' has a gradient") == [True] * 2
    assert ranks(2).run(_named, "rank 1 left") == [False] * 2


# -- how ranks start -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Has a tensor in its state dict that is neither a parameter nor a buffer, and a buffer that is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.extra = torch.full((3,), float(dist.get_rank()))
        with torch.no_grad():
            self.passing += dist.get_rank()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "extra"] = self.extra


def _started(init_sync: bool, buffers: bool | None, forward: bool | None) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    net = Odd()
    DistributedDataParallel(
        net, init_sync=init_sync, broadcast_buffers=buffers, forward_sync_buffers=forward, shared_memory=False
    )
    return [net.layer.weight.detach().clone(), net.passing.clone(), net.extra.clone()]


@pytest.mark.parametrize(
    ("init_sync", "buffers", "forward", "alike"),
    [
        (True, None, None, [True, True, True]),
        (True, False, None, [True, False, False]),
        (True, None, False, [True, True, True]),
        (False, None, None, [False, False, False]),
    ],
)
def test_every_tensor_of_the_state_dict_is_rank_zeros_at_construction(
    ranks: RankPool, init_sync: bool, buffers: bool | None, forward: bool | None, alike: list[bool]
) -> None:
    first, second = ranks(2).run(_started, init_sync, buffers, forward)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == alike


def _expanded() -> nn.Module:
    net = nn.Linear(2, 2)
    net.bias = nn.Parameter(torch.ones(1).expand(2))
    return net


UNUSABLE = [
    (lambda: nn.LazyLinear(2), "parameter 'weight' of LazyLinear belongs to a lazy module .* Run one batch"),
    (lambda: nn.Linear(2, 2, device="meta"), r"parameter 'weight' of Linear is on the meta device .*to_empty"),
    (_expanded, r"parameter 'bias' of Linear is expanded: .*clone"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), "Linear: no parameter requires a gradient"),
    (nn.ReLU, "ReLU: no parameter requires a gradient"),
]


@pytest.mark.parametrize(("make", "said"), UNUSABLE, ids=["lazy", "meta", "expanded", "frozen", "empty"])
def test_what_cannot_be_wrapped_is_named_with_the_way_out(make: Any, said: str) -> None:
    assert re.match(said, find_unusable(make()) or "")


def _one_is_odd() -> str:
    net = nn.Linear(2, 2).requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(net)
    return str(raised.value)


def test_a_module_that_only_one_rank_cannot_wrap_is_named_on_all_of_them(ranks: RankPool) -> None:
    for said in ranks(2).run(_one_is_odd):
        assert said.startswith("rank 1: Linear: no parameter requires a gradient")


def _set_differently() -> list[str]:
    """Each of these would have hung, or broken off, in the first backward."""
    odd = dist.get_rank() == 1
    said = []
    for name, usual, other in SETTINGS:
        with pytest.raises(ValueError) as raised:
            DistributedDataParallel(nn.Linear(2, 2), **{name: other if odd else usual})
        said.append(str(raised.value))
    return said


SETTINGS: list[tuple[str, Any, Any]] = [
    ("static_graph", False, True),
    ("bucket_cap_mb", 25, 1),
    ("shared_memory", True, False),
    ("check_reduction", False, True),
    ("forward_sync_buffers", True, False),
    ("init_sync", True, False),
    ("skip_all_reduce_unused_params", False, True),
]


def test_settings_that_differ_between_ranks_are_named_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks(2).run(_set_differently)
    assert first == second
    for said, (name, usual, other) in zip(first, SETTINGS, strict=True):
        assert said.startswith(
            f"Linear is not the same on every rank: rank 0 has {name}={usual}, rank 1 has {name}={other}."
        )


def _one_has_a_wrong_argument() -> list[str]:
    odd = dist.get_rank() == 1
    said = []
    for name, wrong in (("bucket_cap_mb", -1), ("device_ids", "some"), ("bucket_cap_mb_list", 3)):
        with pytest.raises((ValueError, TypeError)) as raised:
            DistributedDataParallel(nn.Linear(2, 2), **({name: wrong} if odd else {}))
        said.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel("a net" if odd else nn.Linear(2, 2))  # type: ignore[arg-type]
    return [*said, str(raised.value)]


def test_an_argument_that_is_wrong_on_one_rank_is_named_on_every_rank(ranks: RankPool) -> None:
    """The others waited in a broadcast until that rank's process had ended."""
    first, second = ranks(2).run(_one_has_a_wrong_argument)
    assert [said.startswith("rank 1: ") for said in first] == [True] * 4
    for said, own in zip(first, second, strict=True):
        assert own in said
    assert "bucket_cap_mb=-1" in first[0]
    assert "device_ids='some'" in first[1]
    assert "TypeError" in first[2]
    assert "module='a net': pass a torch.nn.Module" in first[3]


def _within(theirs: bool) -> str:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    container = nn.parallel.DistributedDataParallel if theirs else DistributedDataParallel
    net[1] = container(net[1])
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(net)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.module.weight", "1.module.bias"])
    DistributedDataParallel(net)  # each averages its own
    return str(raised.value)


def test_a_container_inside_of_a_container_is_refused(ranks: RankPool) -> None:
    """Both laid the same gradients into buffers of their own, and one averaged what the other had halved."""
    for theirs in (False, True):
        for rank, said in enumerate(ranks(2).run(_within, theirs)):
            assert said.startswith(f"rank {rank}: part '1' of Sequential is a DistributedDataParallel already")


def test_without_a_process_group_the_error_says_so() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(nn.Linear(2, 2))


def _outside() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        return ""
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    return str(raised.value)


def test_a_group_that_does_not_hold_this_rank_is_refused(ranks: RankPool) -> None:
    assert ranks(2).run(_outside)[1].startswith("process_group: rank 1 (of 2) is not a member of the group")


def _transposed() -> list[bool]:
    """A parameter laid out by columns, one with gaps, and one of channels_last."""
    net = nn.ParameterList(
        [
            nn.Parameter(torch.arange(6.0, dtype=torch.float64).view(2, 3).t()),
            nn.Parameter(torch.arange(12.0, dtype=torch.float64).view(3, 4)[:, :2]),
            nn.Parameter(torch.ones(2, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)),
        ]
    )

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, scale: float) -> Tensor:
            return sum(((p * p).sum() * scale for p in self.net), torch.zeros(()))

    DistributedDataParallel(Sum())(dist.get_rank() + 1.0).backward()
    return [bool(torch.equal(p.grad, 2 * p.detach() * 1.5)) for p in net if p.grad is not None]


def test_parameters_that_are_not_contiguous_have_right_gradients(ranks: RankPool) -> None:
    assert ranks(2).run(_transposed) == [[True] * 3] * 2


def test_a_parameter_that_was_cast_or_resized_is_found() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    reducer = Reducer(net.named_parameters(), transport=AllReduce(None))
    assert find_cast(reducer.buckets) is None
    net[0].bias.data = torch.zeros(3)
    assert str(find_cast(reducer.buckets)).startswith("parameter '0.bias' is torch.float32 of shape (3,)")
    net.double()
    assert str(find_cast(reducer.buckets)).startswith("parameter '1.bias' is torch.float64 of shape (2,)")
    reducer.detach()
