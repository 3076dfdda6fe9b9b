"""Each way that a plan says fits is run, and trains: the language model of the examples on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lockstep.extensions.balancing.planned import strategy_of
from lockstep.extensions.balancing.planner.cost import Candidate
from lockstep.extensions.balancing.planner.hardware import Hardware
from lockstep.extensions.balancing.planner.plan import make_plan
from lockstep.extensions.balancing.plans.planning import profile_module
from lockstep.ground.extensions import is_there
from lockstep.precision.formats import make_precision
from tests.extensions.balancing.planner.models import made
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


def trained(candidate: Candidate) -> int:
    model, loader, _ = made("gpt", batches=4)
    devices: Any = 2 if candidate.kind == "dp" else dist.get_world_size() if dist.is_initialized() else 1
    trainer = quiet(strategy=strategy_of(candidate), devices=devices, max_steps=2)
    trainer.fit(model, loader)
    return trainer.global_step


@pytest.mark.extension("deepspeed")
@pytest.mark.slow
def test_each_way_that_fits_can_be_run(ranks: RankPool) -> None:
    model, _, batch = made("gpt")
    profile = profile_module(model, batch, make_precision("32-true"), trainer=quiet())
    machine = Hardware(devices=2, memory=8e9, kind="cpu", overlaps=False)
    plan = make_plan([profile], machine, packages=["deepspeed"])
    there = {kind for kind, extension in (("dp", "parallel"), ("deepspeed", "deepspeed")) if is_there(extension)}
    ways = [row.candidate for row in plan.rows if row.eligible]
    assert {way.kind for way in ways} == {"single", "ddp", "sharded", "fsdp", "fsdp_grads", *there}
    for way in ways:
        if way.kind in ("single", "dp"):
            assert trained(way) == 2, way.name
        else:
            assert ranks(2).run(trained, way, timeout=200) == [2, 2], way.name
