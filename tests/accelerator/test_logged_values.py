"""Values of single steps, reduced over the ranks where they are: the numbers are those of the CPU, to the bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.testing.pool import RankPool


def _reduced(there: bool) -> tuple[list[tuple[str, float]], set[str]]:
    from lockstep.cluster.world import World
    from lockstep.loop.logging import LogCollector
    from lockstep.strategies.collectives import Collectives

    rank, device = dist.get_rank(), torch.device("madeup", dist.get_rank())
    torch.get_device_module("madeup").set_device(device)
    ranks = Collectives()
    ranks.world, ranks.device = World(rank, 2, rank, 2, 0, 1, "127.0.0.1", 0), device
    made = LogCollector(ranks.combined, ranks.from_zero, 2, rank, None, on_cpu=False)
    if there:
        made.reduce_there(ranks.combined_there, device)
    made.enter("training_step")
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


def test_values_reduced_on_the_device_are_those_of_the_cpu(madeup: RankPool) -> None:
    on_host, on_device = madeup(2).run(_reduced, False), madeup(2).run(_reduced, True)
    assert on_host[0] == on_host[1]
    assert on_device[0] == on_device[1]
    assert on_host[0][0] == on_device[0][0]
    assert (on_host[0][1], on_device[0][1]) == ({"cpu"}, {"madeup"})
