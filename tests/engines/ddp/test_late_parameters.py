"""Parameters that come into a model after it was wrapped are noticed, and nothing else is."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch.nn.modules import module as registration

from lockstep.engines.ddp.late_parameters import LateParameters


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_a_module_with_known_parameters_may_come() -> None:
    net = _net()
    came = LateParameters(net)
    norm = nn.SyncBatchNorm(2)
    norm.weight, norm.bias = net[1].weight, net[1].bias  # type: ignore[assignment]
    net[1] = norm
    assert came.found is None
    norm.register_parameter("gain", nn.Parameter(torch.ones(1)))
    assert came.found == "1.gain"


def test_a_newcomer_is_not_taken_for_one_that_is_gone() -> None:
    """A parameter that is let go of leaves its address to the next."""
    values = torch.ones(2)
    for _ in range(100):
        net = _net()
        came = LateParameters(net)
        address = id(net[0].bias)
        net[0].bias = None
        others = [nn.Parameter(values) for _ in range(1000)]  # which fill the place that is free
        taken = [parameter for parameter in others if id(parameter) == address]
        if taken:
            net[0].bias = taken[0]
            assert came.found == "0.bias"
            return
    raise AssertionError("no address was used again")


def test_nothing_stays_behind() -> None:
    came = LateParameters(_net())
    gone = weakref.ref(came)
    before = len(registration._global_parameter_registration_hooks)
    del came
    gc.collect()
    assert gone() is None
    LateParameters(_net())
    assert len(registration._global_parameter_registration_hooks) == before


def test_a_model_that_goes_while_another_is_built_does_not_break_it() -> None:
    """Its hook went with it, in the middle of torch's loop over the hooks: "OrderedDict mutated during iteration"."""
    gone = [LateParameters(_net())]

    def forget(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        gone.clear()
        gc.collect()

    first = registration.register_module_parameter_registration_hook(forget)
    registration._global_parameter_registration_hooks.move_to_end(first.id, last=False)
    try:
        nn.Linear(1, 1)
    finally:
        first.remove()
    assert not gone


def test_an_ignored_name_may_come() -> None:
    """A placeholder that the container was told to ignore, replaced after wrapping, was taken for a newcomer."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    late = LateParameters(model, ignored=["1.weight", "1.bias"])
    model[1] = nn.Linear(1, 1)
    assert late.found is None
    model[0] = nn.Linear(1, 1)
    assert late.found == "0.weight"
