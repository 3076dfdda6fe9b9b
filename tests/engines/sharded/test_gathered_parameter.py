"""What a step does to gathered parameters reaches the shards: N ranks train the model of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lockstep import LightningModule
from lockstep.strategies import FSDPStrategy
from tests.equivalence import models
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x).tanh()
        return out


class Blocks(LightningModule):
    """A layer of the module's own group, and two blocks that are gathered by themselves."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.blocks = nn.Sequential(Block(), Block())
        self.back = nn.Linear(6, 5)

    def through(self, x: Tensor) -> Tensor:
        """Not `forward`, behind which torch frees what it has gathered."""
        out: Tensor = self.back(self.blocks(x))
        return out

    def loss(self, batch: Any) -> Tensor:
        found = self.through(batch[0]).sum(1)
        return mse_loss(found, batch[1].reshape(-1).to(found.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def update_of(self, batch_idx: int) -> int:
        """The number of the update that a micro-batch belongs to."""
        return batch_idx // self.trainer.accumulate_grad_batches

    def is_first(self, batch_idx: int) -> bool:
        """Whether a micro-batch is the first one of its update."""
        return batch_idx % self.trainer.accumulate_grad_batches == 0

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


def agree(ranks: RankPool, module: Callable[[], LightningModule], accumulate: int = 1, **given: Any) -> None:
    strategy = partial(FSDPStrategy, **given)
    models.agree(ranks(2), module, models.rows(24), strategy, batch_size=2, accumulate=accumulate)


# -- gradients ---------------------------------------------------------------------------------------------------


class DropsBySelf(Blocks):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


class DropsInLoop(Blocks):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = None


def trained(module: Callable[[], LightningModule], accumulate: int, devices: int) -> dict[str, Tensor]:
    """The weights behind a fit that no other hook looks at."""
    torch.manual_seed(1)
    trainer = quiet(
        strategy="fsdp" if devices > 1 else "auto",
        devices=devices,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        precision="64-true",
    )
    trainer.fit(module(), rows(24)(4 // devices))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


@pytest.mark.parametrize("module", [DropsBySelf, DropsInLoop])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_own_optimizer_zero_grad_drops_the_gradients_of_shards(
    ranks: RankPool, module: type[Blocks], accumulate: int
) -> None:
    alone = trained(module, accumulate, 1)
    for found in ranks(2).run(partial(trained, module, accumulate, 2), timeout=60):
        torch.testing.assert_close(found, alone, rtol=1e-11, atol=1e-12)


class DropsInStep(Blocks):
    """As DCGAN does: a layer's `zero_grad`, before the backward and between two."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.back.zero_grad()
        self.blocks.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.zero_grad(set_to_none=bool(batch_idx % 2))
        self.manual_backward(self.through(batch[0]).square().mean())
        optimizer.step()


class DropsEverySecond(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class LooksBack(Blocks):
    """Scales the loss by the gradient of the step before, and mixes the gradients of two backwards."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, parameters = self.optimizers(), list(self.back.parameters())
        before = [parameter.grad for parameter in parameters]
        seen = sum(whole(each).square().sum().item() for each in before if each is not None)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / (1 + seen))
        first = [parameter.grad for parameter in parameters]
        optimizer.zero_grad()
        self.manual_backward(self.through(batch[0]).square().mean())
        for parameter, gradient in zip(parameters, first, strict=True):
            assert gradient is not None
            assert parameter.grad is not None
            parameter.grad = gradient - 0.5 * parameter.grad
        optimizer.step()


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


# -- values ------------------------------------------------------------------------------------------------------


class Clamps(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)
        return self.loss(batch)


class ScalesData(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            if self.is_first(batch_idx):
                parameter.data.mul_(0.9)
        return self.loss(batch)


class SetsData(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.back.parameters():
            if self.is_first(batch_idx):
                parameter.data = parameter.data * 0.9
        return self.loss(batch)


class Follows(Blocks):
    """A teacher that is the average of its pupil, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Linear(6, 5).requires_grad_(False)
        self.old_blocks = nn.Sequential(Block(), Block()).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            aim = self.old(self.old_blocks(batch[0]))
        loss = self.loss(batch) + mse_loss(self.through(batch[0]), aim)
        pairs = ((self.old, self.back), (self.old_blocks, self.blocks))
        with torch.no_grad():
            if not self.is_first(batch_idx + 1):
                return loss
            for teacher, pupil in pairs:
                for old, new in zip(teacher.parameters(), pupil.parameters(), strict=True):
                    old.lerp_(new, 0.5)
        return loss


@pytest.mark.parametrize("module", [Clamps, ScalesData, SetsData, Follows])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_writes_in_a_step_reach_the_shards(ranks: RankPool, module: type[Blocks], accumulate: int) -> None:
    agree(ranks, module, accumulate)


@pytest.mark.parametrize(
    "given", [{"sharding_strategy": "SHARD_GRAD_OP"}, {"auto_wrap_policy": {nn.Linear}}, {"cpu_offload": True}]
)
def test_writes_in_a_step_reach_the_shards_in_each_mode(ranks: RankPool, given: dict[str, Any]) -> None:
    agree(ranks, ScalesData, **given)


class ClampsBehind(Blocks):
    """As WGAN does, behind the update."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        self.through(batch[0])
        with torch.no_grad():
            self.back.weight.mul_(0.9)


IN_16_BITS: dict[str, Any] = {"precision": "bf16-mixed"}


class ReadsData(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.back.weight.data.dtype == torch.bfloat16
        return self.loss(batch)


def read_in_16_bits() -> int:
    trainer = quiet(strategy="fsdp", devices=2, max_steps=3, **IN_16_BITS)
    trainer.fit(ReadsData(), rows(12)(2))
    return trainer.global_step


def test_what_only_reads_data_in_16_bits_goes_on(ranks: RankPool) -> None:
    assert ranks(2).run(read_in_16_bits, timeout=60) == [3, 3]


class SetsDataOfShards(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight: Any = self.get_parameter("blocks.0.inner.weight")
        weight.data = weight.data * 0.9
        return self.loss(batch)


class SetsWholeGradient(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.back.weight.grad = torch.ones(5, 6)
        self.optimizers().step()


# -- requires_grad -----------------------------------------------------------------------------------------------


class FreezesInStep(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        update = self.update_of(batch_idx)
        self.back.weight.requires_grad_(update not in (1, 2))
        self.blocks[0].requires_grad_(update not in (2, 3))
        return self.loss(batch)


class FreezesOnce(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.update_of(batch_idx) == 1:
            self.back.weight.requires_grad_(False)
        return self.loss(batch)


@pytest.mark.parametrize("module", [FreezesInStep, FreezesOnce])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_that_a_step_freezes_stays_frozen(ranks: RankPool, module: type[Blocks], accumulate: int) -> None:
    agree(ranks, module, accumulate)


# -- other tensors in the place of parameters --------------------------------------------------------------------


class CallsWithOthers(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        others = {name: 1.5 * parameter for name, parameter in self.blocks.named_parameters()}
        hidden: Any = torch.func.functional_call(self.blocks, others, (batch[0],))
        return self.back(hidden).square().mean()


class CallsOwnWithOthers(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        others = {name: 1.5 * parameter for name, parameter in self.back.named_parameters()}
        found: Tensor = torch.func.functional_call(self.back, others, (self.blocks(batch[0]),))
        return found.square().mean()


# -- hooks on gradients, and what torch's FSDP cannot take -------------------------------------------------------


class MasksByHook(Blocks):
    """Hooks that are there before the module is cut, and one that comes later and goes again."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.back.weight, self.get_parameter("blocks.0.inner.weight")):
            parameter.register_hook(lambda gradient: gradient.tril())

    def on_train_start(self) -> None:
        self.handle = self.back.bias.register_hook(torch.zeros_like)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.update_of(batch_idx) == 2:
            self.handle.remove()
        return self.loss(batch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_on_parameters_change_the_gradients_of_shards(ranks: RankPool, accumulate: int) -> None:
    agree(ranks, MasksByHook, accumulate)


class Accumulates(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.back.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class AccumulatesLate(Blocks):
    def on_train_start(self) -> None:
        self.get_parameter("blocks.0.inner.weight").register_post_accumulate_grad_hook(lambda parameter: None)


REFUSED: list[tuple[Callable[[], LightningModule], dict[str, Any], str]] = [
    (ScalesData, IN_16_BITS, "parameter 'back.weight', which is gathered in bfloat16"),
    (SetsDataOfShards, {}, "`.data` of parameter 'blocks.0.inner.weight' was assigned while"),
    (partial(SetsWholeGradient, by_hand=True), {}, "The gradient of parameter 'back.weight' was set to"),
    (CallsWithOthers, {}, "Parameter 'blocks.0.inner.weight' was replaced by another tensor"),
    (Accumulates, {}, "has a register_post_accumulate_grad_hook"),
    (AccumulatesLate, {}, "has a register_post_accumulate_grad_hook"),
]


@pytest.mark.parametrize(("module", "flags", "said"), REFUSED)
def test_what_would_not_reach_the_shards_is_refused(ranks: RankPool, module: Any, flags: Any, said: str) -> None:
    for found in ranks(2).run(partial(models.refusal, module, "fsdp", rows(12)(2), **flags), timeout=60):
        assert said in found


class Empty(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))


class Penalty(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        found = self.through(x)
        (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return found.square().mean() + slope.square().mean()


class PenaltyOfOwn(Penalty):
    def through(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(x.sin())
        return out

    def configure_model(self) -> None:
        self.blocks = nn.Sequential()


BY_HAND = (DropsInStep, DropsEverySecond, LooksBack, ClampsBehind)


@pytest.mark.parametrize("module", [*BY_HAND, CallsOwnWithOthers, Empty, PenaltyOfOwn])
def test_what_a_step_does_trains_the_model_of_one_process(ranks: RankPool, module: type[Blocks]) -> None:
    agree(ranks, partial(module, by_hand=True) if module in BY_HAND else module)
