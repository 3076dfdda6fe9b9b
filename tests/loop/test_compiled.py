"""`torch.compile(module)` given to the Trainer: the module inside is fitted, and runs compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.compiled import from_compiled, is_compiled, to_uncompiled
from lockstep.loop.hooks import is_overridden
from tests.loop.pieces import Slope, numbers, quiet


class Logs(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        compiled.append(torch.compiler.is_compiling())
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        return loss


compiled: list[bool] = []


@pytest.mark.timeout(120)
def test_a_compiled_module_trains_to_the_same_numbers() -> None:
    modules = [Logs(lr=0.1), Logs(lr=0.1)]
    logged = []
    for module, given in zip(modules, [modules[0], torch.compile(modules[1], backend="eager")], strict=True):
        trainer = quiet(max_epochs=1)
        trainer.fit(given, numbers(3))
        assert trainer.lightning_module is module
        logged.append(trainer.callback_metrics)
    assert torch.equal(modules[0].w, modules[1].w)
    assert logged[0] == logged[1] != {}
    assert modules[1]._compiler_ctx is not None


def test_a_compiled_step_is_what_runs() -> None:
    compiled.clear()
    module = Logs()
    quiet(max_epochs=1).fit(torch.compile(module, backend="eager"), numbers(2))
    assert "training_step" in vars(module)
    assert compiled != [False, False]  # the compiler has looked into it


def test_a_module_and_back() -> None:
    module = Slope()
    wrapped = torch.compile(module, backend="eager")
    assert is_compiled(wrapped)
    assert not is_compiled(module)
    assert from_compiled(wrapped) is module is from_compiled(wrapped)
    assert {"training_step", "log"} <= vars(module).keys()
    assert not is_overridden("validation_step", module, LightningModule)  # only what the module has is compiled
    assert to_uncompiled(module) is module
    assert not {"training_step", "log", "forward"} & vars(module).keys()
    assert module._compiler_ctx is None
    assert to_uncompiled(torch.compile(module, backend="eager")) is module


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from_compiled\(Slope\): pass the result of torch.compile"):
        from_compiled(Slope())
    with pytest.raises(ValueError, match=r"to_uncompiled\(Slope\): this module is not compiled"):
        to_uncompiled(Slope())
    layer = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    with pytest.raises(ValueError, match="a Linear was compiled, which is not a LightningModule"):
        from_compiled(layer)
    with pytest.raises((MisconfigurationException, TypeError), match="OptimizedModule"):
        quiet().fit(layer, numbers(1))
