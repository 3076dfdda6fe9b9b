"""Ranks that are not where the others are: found by check_reduction, named when a collective fails, or helped along."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel import consistency
from lockstep.parallel.consistency import checksum, named_failure
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.testing.pool import RankPool


def _net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


# -- a loss that depends on no output


def _skipping(how: str, static: bool = False) -> tuple[list[Tensor], list[str]]:
    """In every second step rank 1 has nothing to learn from its outputs."""
    net = _net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.0002, static_graph=static)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad()
            output = model(_batch(step, dist.get_rank()))
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
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            if not (step % 2 and rank == 1):
                (net(_batch(step, rank)).square().mean() / 2).backward()
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
            assert said[0].startswith("rank 1: an optimizer steps, and no backward has reached the outputs")


def _looking() -> tuple[int, int]:
    """Forwards that need no backward: one that only looks, one of another net, one in eval mode."""
    net, other = DistributedDataParallel(_net()), DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    other(_batch(0, 0))
    for step in range(2):
        net(_batch(step, 0)).sum().backward()
        with torch.no_grad():
            net(_batch(step, 1))
        net.eval()
        net(_batch(step, 1))
        net.train()
        optimizer.step()
    return net.reducer.rounds, other.reducer.rounds


def test_a_forward_without_a_backward_costs_no_round(ranks: RankPool) -> None:
    assert ranks(2).run(_looking) == [(2, 0)] * 2


# -- check_reduction


def _checked(fault: str) -> str:
    net = _net()
    model = DistributedDataParallel(net, check_reduction=True, bucket_cap_mb=0.0001)
    odd = dist.get_rank() == 1
    try:
        for step in range(4):
            net.zero_grad()
            output = model(_batch(step, dist.get_rank()))
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
                    model._checks.note()  # type: ignore
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        (
            "skipped",
            "rank 0 begins a backward, rank 1 begins a forward. No backward has reached the outputs of the last ",
        ),
        ("altered", "rank 1 had another gradient of parameter '2.bias'"),
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


def test_a_checksum_depends_on_every_bit_and_its_place() -> None:
    grad = torch.randn(5, 4)
    other = grad.clone()
    assert checksum(grad) == checksum(other)
    other[3, 2] = torch.nextafter(other[3, 2], torch.tensor(9.0))
    assert checksum(grad) != checksum(other)
    assert checksum(grad) != checksum(grad.flip(0))
    assert checksum(grad.to(torch.complex64)) != checksum(grad.to(torch.bfloat16))
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3).to_sparse())
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


# -- ranks that are gone


def _leaving(shared: bool) -> str:
    """Rank 1 ends its part after its first step: closes its memory, or comes to no collective any more."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = DistributedDataParallel(_net(), process_group=group, shared_memory=shared)
    for step in range(3):
        if step and dist.get_rank() == 1:
            model.reducer.detach()
            return ""
        try:
            with patch.object(consistency, "PATIENCE", 1.0):  # the seconds that a rank waits for what the others say
                model(_batch(step, dist.get_rank())).square().mean().backward()
        except RuntimeError as error:
            return str(error)
    return "nobody left"


@pytest.mark.parametrize("shared", [False, True], ids=["over TCP", "shared memory"])
def test_a_rank_that_leaves_early_is_named_by_the_others(ranks: RankPool, shared: bool) -> None:
    said = ranks(3).run(_leaving, shared)
    for rank in (0, 2):
        assert said[rank].startswith(f"rank {rank}, averaging the gradients of round 2: rank 1 was not there")


def _failing(how: str) -> str:
    """Rank 1 makes a mistake in its second step, and raises; gives what this rank raises."""
    odd = dist.get_rank() == 1
    net = _net()
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
            batch = _batch(step, dist.get_rank()).to(net[0].weight.dtype)  # type: ignore[arg-type]
            model(batch[:, :3] if wrong and how == "forward" else batch).square().mean().backward()
    except (RuntimeError, ValueError) as error:
        model.reducer.detach()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("added", "MisconfigurationException: rank 1: parameter 'left_over' was added to the model"),
        ("cast", "MisconfigurationException: rank 1: parameter 'left.bias' has become torch.float32 of shape (2,)"),
        ("forward", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_one_rank_raises_is_told_by_the_others(ranks: RankPool, how: str, said: str) -> None:
    """They said that it was gone, failed, or elsewhere in its program."""
    first, second = ranks(2).run(_failing, how)
    assert first.startswith(f"rank 0, averaging the gradients of round 2: rank 1 was not there: it raised {said}")
    assert second in first


def _named(text: str) -> list[bool]:
    noted: list[Exception] = []

    def note(error: Exception) -> Exception:
        noted.append(error)
        return error

    def fail() -> None:
        with named_failure(dist.new_group(), "averaging the gradients", 1, note):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError) as raised:
        fail()
    return [str(raised.value) == text, noted == [raised.value]]


def test_a_parameter_called_left_is_no_lost_rank(ranks: RankPool) -> None:
    """Its name in an error was taken for the news of a rank that has gone."""
    assert ranks(2).run(_named, "parameter 'left.weight' got a gradient") == [[True, True]] * 2
    assert ranks(2).run(_named, "rank 1 left") == [[False, True]] * 2
