"""Layers of a sharded module that are called in hooks and behind backwards: nothing stale is read, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.callbacks import Callback
from lockstep.strategies import FSDPStrategy, ModelParallelStrategy
from tests.engines.called_layers import Forward, Submodule
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


class Looking(Submodule):
    """Calls a layer in every hook of training, with gradients and without."""

    def on_train_start(self) -> None:
        self.look()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.apply_to(batch[0]).sum()  # with a graph, which nobody goes back through

    def on_after_backward(self) -> None:
        self.look()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()
        with torch.no_grad():  # what is done to parameters behind a call counts
            for parameter in self.parameters():
                parameter.mul_(0.99)

    def on_validation_epoch_start(self) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()


class LookingForward(Looking, Forward):
    pass


class ByHand(Submodule):
    """Manual optimization: calls behind a backward, with the weights of before and behind an update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.losses(batch[0]).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.look()
            optimizer.step()
            self.look()
        self.log("loss", loss)


class Swapping(Callback):
    """An average of the user's own, which is swapped in for a validation."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            before = self.average.get(name)
            now = parameter.detach().clone()
            self.average[name] = now if before is None else before * 0.9 + now * 0.1

    @torch.no_grad()
    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            if name in self.average:
                parameter.copy_(self.average[name])

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.copy_(self.kept[name])


ENGINES: dict[str, Callable[[], Any]] = {
    "fsdp": FSDPStrategy,
    "fsdp, by layers": lambda: FSDPStrategy(auto_wrap_policy={torch.nn.Linear}),
    "model parallel 2 x 1": lambda: ModelParallelStrategy(2, 1),
}
KINDS = {
    "layer": (Looking, False),
    "module": (LookingForward, False),
    "by hand": (ByHand, False),
    "swapped": (Submodule, True),
}
EVERY_DAY = [("fsdp", "layer"), ("fsdp", "by hand"), ("model parallel 2 x 1", "swapped")]


def played(engine: str | None, case: str) -> tuple[list[float], dict[str, Tensor]]:
    kind, swaps = KINDS[case]
    world = 1 if engine is None else 2
    strategy: Any = "auto" if engine is None else ENGINES[engine]()
    trainer = quiet(
        strategy=strategy,
        devices=world,
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=1 if "hand" in case else 2,
        callbacks=[Swapping()] if swaps else [],
    )
    trainer.seed = 5
    torch.manual_seed(1)
    module = kind()
    trainer.fit(module, rows(24)(4 // world), rows(12)(4 // world))
    whole = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return [float(trainer.callback_metrics["val"]), module.looked], whole


SELDOM = [(engine, case) for engine in ENGINES for case in KINDS if (engine, case) not in EVERY_DAY]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("engine", "case"), [*EVERY_DAY, *(pytest.param(*each, marks=pytest.mark.slow) for each in SELDOM)]
)
def test_calls_in_hooks_are_those_of_one_process(ranks: RankPool, engine: str, case: str) -> None:
    """A call behind a backward left whole weights, with which the next step computed, without the update."""
    ((expected, weights),) = ranks(1).run(played, None, case, group=False)
    for seen, whole in ranks(2).run(played, engine, case, timeout=60):
        assert seen == pytest.approx(expected, rel=1e-10)
        torch.testing.assert_close(whole, weights, rtol=1e-10, atol=1e-12)
