"""Values of single steps, reduced over the ranks where they are: the numbers are those of the CPU, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.loop.logging import LogCollector
from tests.tools.pool import RankPool


def _collector(there: bool) -> LogCollector:
    from lockstep.cluster.world import World
    from lockstep.engines.collectives import Collectives

    rank, device = dist.get_rank(), torch.device("madeup", dist.get_rank())
    ranks = Collectives()
    ranks.world, ranks.device = World(rank, 2, rank, 2, 0, 1, "127.0.0.1", 0), device
    made = LogCollector(ranks.combined, ranks.from_zero, 2, rank, None, on_cpu=False)
    if there:
        made.reduce_on_device(ranks.combined_there, device)
    made.enter("training_step")
    return made


def _reduced(there: bool) -> tuple[list[tuple[str, float]], set[str]]:
    rank, device = dist.get_rank(), torch.device("madeup", dist.get_rank())
    torch.get_device_module("madeup").set_device(device)
    made = _collector(there)
    found: list[tuple[str, float]] = []
    kinds: set[str] = set()
    for step in (1, 2, 3):
        made.micro_batch, made.weight = step, 3.0 - rank
        for op in ("mean", "sum", "min", "max"):
            value = torch.tensor(0.1 * step - rank / 3, device=device)
            options: Any = (True, None, True, False, op, True, False, False)
            made.log(op, value, options, None)
        if step == 2 and rank:  # the other rank has logged it in no step, or in an older one
            made.log("alone", 0.7, (True, None, True, False, "mean", True, False, False), None)
        if step == 3 and not rank:
            made.log(
                "alone", torch.tensor(-0.0, device=device), (True, None, True, False, "mean", True, False, False), 2
            )
        values = made.agree_on_step()
        kinds |= {value.device.type for _, _, value in values}
        found += [(name, float(value)) for _, name, value in values]
    return found, kinds


def _of_a_loss_in_parts(there: bool) -> list[tuple[str, float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    rank = dist.get_rank()
    torch.get_device_module("madeup").set_device(rank)
    mesh = init_device_mesh("madeup", (2,))
    made = _collector(there)
    made.micro_batch, made.weight = 1, 2.0
    loss = DTensor.from_local(torch.tensor(1.5 + rank, device=torch.device("madeup", rank)), mesh, [Partial()])
    made.log("loss", loss, (True, None, True, False, "mean", True, False, False), None)
    return [(name, float(value)) for _, name, value in made.agree_on_step()]


@pytest.mark.parametrize("there", [False, True])
def test_a_loss_that_is_split_over_ranks_is_logged_whole(madeup: RankPool, there: bool) -> None:
    """A row is made of values on the device: a DTensor could not be put into one, nor read for the bar."""
    assert madeup(2).run(_of_a_loss_in_parts, there) == [[("loss", 4.0)]] * 2


def test_values_reduced_on_the_device_are_those_of_the_cpu(madeup: RankPool) -> None:
    on_host, on_device = madeup(2).run(_reduced, False), madeup(2).run(_reduced, True)
    assert on_host[0] == on_host[1]
    assert on_device[0] == on_device[1]
    assert on_host[0][0] == on_device[0][0]
    assert (on_host[0][1], on_device[0][1]) == ({"cpu"}, {"madeup"})
