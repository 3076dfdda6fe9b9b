"""What is known of a model: blocks, tied parameters, states, work; without a trace left in it; and what is refused."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import LightningModule
from lockstep.extensions.balancing.planner import profile
from lockstep.extensions.balancing.planner.profile import find_units, measure_step
from lockstep.extensions.balancing.planner.trace import BACKWARD, FORWARD, UPDATE, TracedStep
from lockstep.extensions.balancing.plans.planning import profile_module
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import Precision
from lockstep.precision.formats import make_precision
from tests.extensions.balancing.balanced import QueuedWork
from tests.extensions.balancing.planner.models import Model, Residual, Tied, made
from tests.loop.pieces import quiet


@functools.cache
def profiled(name: str, precision: str = "32-true") -> Any:
    module, _, batch = made(name)
    return profile_module(module, batch, make_precision(precision), trainer=quiet())


def test_blocks_are_repeated_ones_or_the_parts_of_a_chain() -> None:
    deep = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*[Residual(8) for _ in range(3)]), nn.Flatten())
    assert list(find_units(deep)) == ["1.0", "1.1", "1.2"]
    assert list(find_units(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))) == ["0", "2"]
    assert list(find_units(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), ["1"])) == ["1"]
    with pytest.raises(ValueError, match="has no submodule 'middle'"):
        find_units(deep, ["middle"])


def test_tied_parameters_count_once() -> None:
    profile = profiled("tied")
    assert profile.elements == sum(p.numel() for p in made("tied")[0].parameters())
    assert [p.name for p in profile.parameters].count("net.head.weight") == 0


def test_states_of_optimizers_are_told_by_parameter() -> None:
    profile = profiled("lstm")
    assert {(p.like, p.fixed) for p in profile.parameters} == {(8, 4)}  # Adam: two means, and a count of steps
    assert profile.elementwise


def test_blocks_of_one_kind_cost_the_same() -> None:
    profile = profiled("mixer")
    assert len(profile.blocks) == 4
    assert len({(block.kind, block.sends) for block in profile.blocks}) == 1
    assert len({block.kept for block in profile.blocks[1:-1]}) == 1  # batch and loss are at the ends
    kept, again = profile.steps["kept"], profile.steps["recomputed"]
    for phase in (FORWARD, UPDATE):
        assert again.work(phase).products == kept.work(phase).products
    more = again.work(BACKWARD).products - kept.work(BACKWARD).products
    assert 0.5 * kept.work(FORWARD).products < more <= kept.work(FORWARD).products  # it ends with what is needed
    assert max(span.peak for span in again.spans) < 0.6 * max(span.peak for span in kept.spans)


def test_a_profile_leaves_no_trace() -> None:
    module, _, batch = made("tied")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters, state = list(module.parameters()), torch.get_rng_state()
    step = TracedStep(
        module, lambda: module.training_step(batch, 0), lambda: [module.configure_optimizers()], nullcontext
    )
    profile = profile_module(module, batch, Precision(), trainer=quiet())
    measure_step(profile, step, torch.device("cpu"), warm_up=1, steps=2)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())
    assert not vars(module).get("log")
    assert module._trainer is None


def test_measured_seconds_are_those_of_all_spans() -> None:
    module, _, batch = made("mixer")
    profile = profile_module(module, batch, Precision(), trainer=quiet(), device=torch.device("cpu"))
    assert profile.device == "cpu"
    step = profile.steps["kept"]
    assert all(span.seconds is not None for span in step.spans)
    blocks = [step.seconds(FORWARD, number) for number in range(4)]
    assert len(set(blocks)) == 1  # of one kind: their median
    again = profile.steps["recomputed"].seconds(BACKWARD)
    whole = step.seconds(BACKWARD)
    assert again is not None
    assert whole is not None
    assert again > whole


def test_a_model_without_memory_is_profiled() -> None:
    with torch.device("meta"):
        model = Model(Tied(2048, 4), classes=True)
    words = torch.zeros(2, 64, dtype=torch.long)
    profile = profile_module(model, (words, words), Precision(), trainer=quiet())
    assert profile.elements > 200e6
    assert all(p.is_meta for p in model.parameters())


def test_layers_of_configure_model_are_seen_and_not_made() -> None:
    class Late(Model):
        def __init__(self) -> None:
            super().__init__(nn.Identity())

        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))

    late = Late()
    profile = profile_module(late, (torch.ones(3, 8), torch.ones(3, 4)), Precision(), trainer=quiet())
    assert profile.elements == 8 * 16 + 16 + 16 * 4 + 4
    assert not list(late.parameters())


def test_mixed_precision_keeps_smaller_activations() -> None:
    assert profiled("encoder", "bf16-mixed").blocks[0].kept < 0.9 * profiled("encoder").blocks[0].kept
    assert profiled("wide", "bf16-true").parameters[0].itemsize == 2


class Looks(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class ByHand(Model):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class Lossless(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Looks, r"Looks: `training_step` depends on values .*`\.item\(\)`"),
        (ByHand, "ByHand sets automatic_optimization = False.* choose a strategy by its name"),
        (Lossless, "Lossless.training_step returned no loss"),
    ],
)
def test_what_cannot_be_planned_is_said(kind: type[LightningModule], said: str) -> None:
    module = kind(nn.Linear(4, 4))
    with pytest.raises(MisconfigurationException, match=said):
        profile_module(module, (torch.ones(2, 4), torch.ones(2, 4)), Precision(), trainer=quiet())
    assert not module.net.weight.is_meta  # type: ignore[union-attr]
    assert type(module.net.weight) is nn.Parameter  # type: ignore[union-attr]


def test_blocks_on_a_device_are_measured_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device was waited for at each block's edge, so that each block's launches counted as its time."""
    work, waits = QueuedWork(), list[torch.device]()

    def synchronize(device: torch.device) -> None:
        work.done = work.queued
        waits.append(device)

    monkeypatch.setattr(profile, "has_timed_events", lambda device: True)
    monkeypatch.setattr(profile, "timed_event", lambda device: work.event())
    monkeypatch.setattr(profile, "synchronize", synchronize)
    clock = profile._Clock([], torch.device("cuda", 0))
    for phase, unit, seconds in (("forward", 0, 3.0), ("forward", 1, 7.0), ("backward", 1, 0.0)):
        clock.record(phase, unit)
        work.passes(seconds)
    assert waits == []
    assert clock.seconds() == {("forward", 0): 3.0, ("forward", 1): 7.0}
    assert waits == [torch.device("cuda", 0)]
