"""What a plan chooses in made-up cases, held to the rows of a well-known table by size of model and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.extensions.balancing.planner.hardware import described
from lockstep.extensions.balancing.planner.plan import Plan, make_plan
from tests.extensions.balancing.planner.made_up import GB, transformer

SHARDED = ("fsdp", "fsdp_grads")


def planned(billions: float, devices: int, memory: float, nodes: int = 1, goal: str = "speed", kept: float = 4) -> Plan:
    machine = described(devices, nodes, memory * GB)
    return make_plan([transformer(billions, kept=kept * GB)], machine, goal=goal, packages=["deepspeed"])  # type: ignore[arg-type]


def chosen(plan: Plan) -> tuple[str, int, bool]:
    assert plan.choice is not None, plan.reason
    assert plan.reason.startswith(plan.choice.candidate.name)
    assert plan.choice.memory <= plan.hardware.memory
    candidate = plan.choice.candidate
    return candidate.kind, candidate.stage, candidate.offload


@pytest.mark.everyday
@pytest.mark.parametrize("billions", [0.1, 0.3, 0.49])
@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("memory", [24, 80])
def test_less_than_half_a_billion(billions: float, devices: int, memory: float) -> None:
    assert chosen(planned(billions, devices, memory)) == ("single" if devices == 1 else "ddp", 0, False)


@pytest.mark.everyday
@pytest.mark.parametrize("billions", [1.2, 2.0, 3.0])
@pytest.mark.parametrize("devices", [4, 8, 16])
def test_up_to_three_billion_in_limited_memory(billions: float, devices: int) -> None:
    plan = planned(billions, devices, 24)
    kind, stage, _ = chosen(plan)
    assert kind in SHARDED or (kind, stage) == ("deepspeed", 2)
    assert "ddp lacks" in plan.reason


@pytest.mark.parametrize(
    ("billions", "devices", "memory"), [(3.5, 8, 24), (5, 8, 24), (7, 16, 24), (7, 4, 80), (7, 8, 80)]
)
def test_more_than_three_billion(billions: float, devices: int, memory: float) -> None:
    kind, stage, _ = chosen(planned(billions, devices, memory))
    assert kind in SHARDED or (kind, stage) == ("deepspeed", 3)


@pytest.mark.parametrize(("billions", "devices"), [(3, 1), (5, 2), (7, 1), (7, 4)])
def test_more_than_three_billion_where_shards_are_still_too_large(billions: float, devices: int) -> None:
    assert chosen(planned(billions, devices, 24)) == ("deepspeed", 3, True)


@pytest.mark.everyday
@pytest.mark.parametrize("billions", [0.1, 1.0, 3.0, 7.0])
@pytest.mark.parametrize(("devices", "memory"), [(1, 24), (8, 24), (16, 80)])
def test_any_size_at_maximum_efficiency(billions: float, devices: int, memory: float) -> None:
    """DeepSpeed with offloading, where nothing can be computed again; else FSDP, which can do both, needs less."""
    machine, model = described(devices, 1, memory * GB), transformer(billions)
    kept = replace(model, steps={"kept": model.steps["kept"]})
    plan = make_plan([kept], machine, goal="memory", packages=["deepspeed"])
    kind, _, offload = chosen(plan)
    assert (kind, offload) == ("deepspeed", True)
    assert "the least memory" in plan.reason
    both = make_plan([model], machine, goal="memory", packages=["deepspeed"]).choice
    assert both is not None
    assert both.candidate.recomputed
    assert both.candidate.kind == "fsdp_offload" or both.candidate.offload
    assert plan.choice is not None
    assert both.memory < plan.choice.memory


def test_several_nodes() -> None:
    assert chosen(planned(0.2, 8, 24, nodes=2)) == ("ddp", 0, False)
    assert chosen(planned(3.0, 8, 24, nodes=2))[0] in (*SHARDED, "deepspeed")


def test_what_fits_is_not_cut_between_the_rows() -> None:
    """The table speaks of limited memory from half a billion on; where there is enough, ddp is the faster one."""
    for billions in (0.7, 1.5, 3.0):
        assert chosen(planned(billions, 8, 80)) == ("ddp", 0, False)
    assert chosen(planned(0.9, 1, 80)) == ("single", 0, False)


@pytest.mark.parametrize("devices", [1, 4])
def test_activations_that_dominate_are_computed_again(devices: int) -> None:
    plan = planned(0.2, devices, 24, kept=60)
    assert plan.choice is not None
    assert plan.choice.candidate.recomputed
    assert "(mostly for activations)" in plan.reason


def test_a_model_that_fits_nowhere_says_what_is_missing_and_what_would_do() -> None:
    plan = make_plan([transformer(7, kept=400 * GB, blocks=2)], described(2, 1, 24 * GB), packages=[])
    assert plan.choice is None
    assert plan.reason.startswith("Nothing fits: ")
    assert " more than the 20.6 GiB of a device" in plan.reason
    assert "devices of " in plan.reason
