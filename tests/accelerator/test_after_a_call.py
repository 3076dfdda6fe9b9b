"""What a call leaves on the made-up device, and what one process does on several of them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import Trainer
from lockstep.ground.extensions import is_there
from tests.accelerator.madeup import NAME
from tests.accelerator.test_lockstep import QUIET, Plain, rows
from tests.tools.pool import RankPool


def _left(flags: dict[str, Any]) -> list[Any]:
    """Bytes on the device behind a fit, a validation and a second fit; and whether the module works on the CPU."""
    module, device = Plain(), torch.get_device_module(NAME)
    trainer = Trainer(accelerator=NAME, max_epochs=1, **QUIET, **flags)
    gc.collect()
    before, left = device.memory_allocated(), []
    trainer.fit(module, rows(40))
    states = [v.device.type for s in trainer.optimizers[0].state.values() for v in s.values() if v.dim()]
    for call in (lambda: None, lambda: trainer.validate(module, rows(40), verbose=False)):
        call()
        gc.collect()
        left.append(device.memory_allocated() - before)
    return [left, {p.device.type for p in module.parameters()}, set(states), module.net(torch.ones(1, 3)).device.type]


@pytest.mark.parametrize("flags", [{"devices": 1}, {"devices": 2, "strategy": "ddp"}], ids=["one", "ddp"])
def test_nothing_is_left_on_the_device(madeup: RankPool, flags: dict[str, Any]) -> None:
    for left, parameters, states, output in madeup(flags["devices"]).run(_left, flags, group=flags["devices"] > 1):
        assert (parameters, states, output) == ({"cpu"}, {"cpu"}, "cpu")
        assert max(left) < 4096, left  # logged values


def _trained(flags: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module = Plain()
    Trainer(max_epochs=1, **QUIET, **flags).fit(module, rows(40))
    return [parameter.detach().cpu() for parameter in module.parameters()]


def _on_several() -> list[list[Tensor]]:
    return [_trained({"accelerator": NAME, "devices": 3, "strategy": "dp"}), _trained({"accelerator": "cpu"})]


@pytest.mark.skipif(not is_there("parallel"), reason="dp is of the extension parallel")
def test_one_process_on_three_devices_trains_as_on_the_cpu(madeup: RankPool) -> None:
    ((several, alone),) = madeup(1).run(_on_several, group=False)
    for one, other in zip(several, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
