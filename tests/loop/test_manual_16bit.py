"""Manual optimization under 16-mixed: gradients are the true ones whenever the user looks, whoever steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.strategies import DDPStrategy
from lockstep.testing.devices import VARIABLE
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SEEDED = 7
DEVICE = "cuda" if os.environ.get(VARIABLE) == "cuda" else "cpu"
"""Where results are computed by hand: a card has bits of its own, other devices have the CPU's."""


def batches(size: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), batch_size=size)  # type: ignore[arg-type]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as it is found on the net: two backwards a step, and the optimizer inside."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad / norm * 0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Pair(nn.Module):
    """Two nets, as a GAN has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEEDED)
        self.a, self.b = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Linear(4, 1)

    def loss_a(self, x: Any) -> Any:
        return (self.b(self.a(x)).float() + 1).pow(2).mean() / 64  # so that 65,536 times its gradient is in the range

    def loss_b(self, x: Any) -> Any:
        return ((self.b(x).float() - 1).pow(2).mean() + self.b(self.a(x)).float().pow(2).mean()) / 64


class ByHand:
    """The loop that somebody writes with torch's GradScaler, or without any: what the Trainer is held against."""

    def __init__(self, mixed: bool) -> None:
        self.mixed, self.norms = mixed, []  # type: ignore[var-annotated]
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=mixed)
        self.unscaled: set[int] = set()

    def backward(self, loss: Any) -> None:
        self.scaler.scale(loss).backward()

    def whole(self, optimizer: Any) -> None:
        """The gradients of an optimizer are whole: it may be clipped and stepped."""
        if id(optimizer) not in self.unscaled:
            self.scaler.unscale_(optimizer)
            self.unscaled.add(id(optimizer))

    def clip(self, optimizer: Any, value: float, algorithm: str) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            torch.nn.utils.clip_grad_value_(parameters, value)

    def step(self, optimizer: Any) -> None:
        self.whole(optimizer)
        self.scaler.step(optimizer)

    def end(self) -> None:
        if self.unscaled:
            self.scaler.update()
        self.unscaled = set()


class InTrainer(LightningModule):
    """The same by the Trainer."""

    def __init__(self, shape: Callable[..., Any], make: Callable[..., Any], raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.shape, self.make, self.raw = Pair(), shape, make, raw
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        found = self.optimizers(use_pl_optimizer=not self.raw)
        self.shape(self, self.net, found if isinstance(found, list) else [found], batch, batch_idx)

    def whole(self, optimizer: Any) -> None: ...

    def clip(self, optimizer: Any, value: float, algorithm: str) -> None:
        self.clip_gradients(optimizer, value, algorithm)

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def end(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return self.make(self.net)


def one(net: Pair) -> list[Any]:
    return [torch.optim.Adam(net.parameters(), 0.05)]


def two(net: Pair) -> list[Any]:
    return [torch.optim.SGD(net.a.parameters(), 6.0), torch.optim.Adam(net.b.parameters(), 0.05)]


def backward(ops: Any, loss: Any) -> None:
    ops.manual_backward(loss) if isinstance(ops, InTrainer) else ops.backward(loss)


def norm_of(net: nn.Module) -> float:
    return float(torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm())


def clipped(algorithm: str) -> Callable[..., None]:
    """A step that clips by ``algorithm``, by torch's own function, or not ("")."""

    def shape(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
        optimizers[0].zero_grad()
        backward(ops, net.loss_b(batch))
        ops.whole(optimizers[0])
        if algorithm == "torch":
            ops.norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)))
        elif algorithm:
            ops.clip(optimizers[0], 0.01, algorithm)
        ops.norms.append(norm_of(net))
        ops.step(optimizers[0])
        ops.end()

    return shape


plain = clipped("")


def accumulates(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
    backward(ops, net.loss_b(batch) / 3)
    if batch_idx % 3 == 2:
        ops.whole(optimizers[0])
        ops.clip(optimizers[0], 0.01, "norm")
        ops.norms.append(norm_of(net))
        ops.step(optimizers[0])
        optimizers[0].zero_grad()
        ops.end()


def gan(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
    for optimizer, loss in zip(optimizers, (net.loss_a, net.loss_b), strict=True):
        optimizer.zero_grad()
        backward(ops, loss(batch))  # gives the other net gradients, too
        ops.whole(optimizer)
        ops.step(optimizer)
        ops.end()


def both_backwards_first(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for loss in (net.loss_a, net.loss_b):
        backward(ops, loss(batch))
    for optimizer in optimizers:
        ops.step(optimizer)
    ops.end()


def sharpness(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
    sam = optimizers[0]
    sam.zero_grad()
    backward(ops, net.loss_b(batch))
    ops.whole(sam)
    sam.first_step()
    ops.end()
    sam.zero_grad()
    backward(ops, net.loss_b(batch))
    ops.whole(sam)
    sam.second_step()
    ops.end()


def by_hand(shape: Any, make: Any, mixed: bool) -> tuple[Pair, ByHand]:
    net, ops = Pair().to(DEVICE), ByHand(mixed)
    optimizers = make(net)
    for batch_idx, batch in enumerate(batches()):
        with torch.autocast(DEVICE, torch.float16, enabled=mixed, cache_enabled=False):
            shape(ops, net, optimizers, batch.to(DEVICE), batch_idx)
    return net.cpu(), ops


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


SHAPES = {
    "plain": (plain, one, 6),
    "clipped by norm": (clipped("norm"), one, 6),
    "clipped by value": (clipped("value"), one, 6),
    "clipped by torch": (clipped("torch"), one, 6),
    "accumulated": (accumulates, one, 2),
    "gan": (gan, two, 12),
    "both backwards first": (both_backwards_first, two, 12),
    "sharpness": (sharpness, lambda net: [SAM(net.parameters(), 3.0)], 6),
}


@pytest.mark.everyday
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_a_step_is_that_of_a_loop_by_hand(name: str, raw: bool) -> None:
    """Clipping in `training_step` saw gradients 65,536 times as long; a plain optimizer's step was as much too long."""
    shape, make, steps = SHAPES[name]
    module = InTrainer(shape, make, raw)
    result = quiet(precision="16-mixed", max_epochs=1).fit(module, batches())
    net, ops = by_hand(shape, make, mixed=True)
    torch.testing.assert_close(weights(module.net), weights(net), rtol=0, atol=0)
    assert module.norms == ops.norms
    assert result.global_step == steps
    full, _ = by_hand(shape, make, mixed=False)
    moved = weights(full) - weights(Pair())
    assert (weights(module.net) - weights(full)).norm() < 0.05 * moved.norm()


def bursts(shape: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with batches in which every gradient overflows."""

    def played(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
        shape(ops, net, optimizers, batch * (1e30 if batch_idx in (1, 4) else 1.0), batch_idx)

    return played


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("name", "steps"), [("plain", 4), ("clipped by value", 4), ("clipped by torch", 4), ("gan", 8), ("sharpness", 4)]
)
def test_steps_with_an_overflow_are_left_out_as_by_hand_and_do_not_count(name: str, steps: int, raw: bool) -> None:
    shape, make, _ = SHAPES[name]
    if name == "sharpness":  # by hand, `second_step` would take the weights along
        shape = plain
        make = one
    module, trainer = InTrainer(bursts(shape), make, raw), quiet(precision="16-mixed", max_epochs=1)
    result = trainer.fit(module, batches())
    net, ops = by_hand(bursts(shape), make, mixed=True)
    torch.testing.assert_close(weights(module.net), weights(net), rtol=0, atol=0)
    assert result.global_step == steps
    assert trainer.scaler.get_scale() == ops.scaler.get_scale() < 65536


def test_an_overflow_in_sharpness_aware_steps_leaves_the_weights() -> None:
    module = InTrainer(lambda ops, net, by, batch, at: sharpness(ops, net, by, batch * 1e30, at), sams)
    result = quiet(precision="16-mixed", max_epochs=1).fit(module, batches())
    assert torch.equal(weights(module.net), weights(Pair()))
    assert result.global_step == 0


def sams(net: Pair) -> list[Any]:
    return [SAM(net.parameters(), 3.0)]


def sgd(net: Pair) -> list[Any]:
    return [torch.optim.SGD(net.parameters(), 3.0)]


def check_alike(make: Callable[[], LightningModule], **flags: Any) -> None:
    """A fit in 16 bits ends close to that in 32."""
    found = []
    for precision in ("32-true", "16-mixed"):
        module: Any = make()
        quiet(precision=precision, max_epochs=1, **flags).fit(module, batches())
        found.append(weights(module.net))
    assert (found[1] - found[0]).norm() < 0.05 * (found[0] - weights(Pair())).norm()


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("wants", [False, True])
def test_closures(raw: bool, wants: bool) -> None:
    """SAM calls its closure twice, SGD once."""

    def shape(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
        def closure() -> Any:
            optimizers[0].zero_grad()
            loss = net.loss_b(batch)
            backward(ops, loss)
            return loss

        optimizers[0].step(closure)

    make = sams if wants else sgd
    check_alike(lambda: InTrainer(shape, make, raw))


def test_a_backward_that_nobody_scaled_is_stepped_as_it_is() -> None:
    """`loss.backward()` in place of `manual_backward`: the step was 65,536 times too short."""

    def shape(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
        optimizers[0].zero_grad()
        net.loss_b(batch).backward()
        optimizers[0].step()

    check_alike(lambda: InTrainer(shape, sgd))


def test_who_unscales_by_hand_as_under_lightning_does_no_harm() -> None:
    def shape(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
        optimizers[0].zero_grad()
        backward(ops, net.loss_b(batch))
        ops.trainer.scaler.unscale_(optimizers[0])
        ops.norms.append(norm_of(net))
        ops.step(optimizers[0])

    module = InTrainer(shape, one)
    quiet(precision="16-mixed", max_epochs=1).fit(module, batches())
    net, ops = by_hand(plain, one, mixed=True)
    assert module.norms == ops.norms
    assert torch.equal(weights(module.net), weights(net))


def test_lbfgs_is_refused_before_the_first_step() -> None:
    module = InTrainer(plain, lambda net: [torch.optim.LBFGS(net.parameters())])
    with pytest.raises(MisconfigurationException, match=r"16-mixed.*LBFGS"):
        quiet(precision="16-mixed", max_epochs=1).fit(module, batches())


# -- automatic optimization, where the user takes a part of the step over


class Automatic(LightningModule):
    """Its second batch overflows."""

    def __init__(self, make: Callable[..., Any], how: str) -> None:
        super().__init__()
        self.net, self.make, self.how = Pair(), make, how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.loss_b(batch) * (torch.inf if batch_idx == 1 else 1.0)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "wrapped":
            optimizer.step(closure=optimizer_closure)
        elif self.how == "plain":
            optimizer.optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
            optimizer.optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.make(self.net)


@pytest.mark.parametrize("how", ["wrapped", "plain", "after"])
def test_an_optimizer_step_of_ones_own_leaves_overflows_out(how: str) -> None:
    """`optimizer.optimizer.step()` made the step with gradients that were not finite."""
    found = []
    for each in ("wrapped", how):
        module = Automatic(lambda net: torch.optim.SGD(net.parameters(), 3.0), each)
        trainer = quiet(precision="16-mixed", max_epochs=1)
        assert trainer.fit(module, batches()).global_step == 5
        assert trainer.scaler.get_scale() == 32768.0
        found.append(weights(module.net))
    assert torch.equal(*found)
    assert found[0].isfinite().all()


def test_sam_calls_its_closure_twice() -> None:
    """It was given none under 16-mixed."""
    check_alike(lambda: Automatic(lambda net: sams(net)[0], "wrapped"), limit_train_batches=1)


# -- on ranks


def blocked(ops: Any, net: Pair, optimizers: list[Any], batch: Any, batch_idx: int) -> None:
    """Two backwards, of which the first is not reduced; clipped; every second step overflows on one rank alone."""
    optimizers[0].zero_grad()
    with ops.trainer.strategy.block_backward_sync():
        backward(ops, net.loss_b(batch) / 2)
    factor = 1e30 if batch_idx == 1 and ops.trainer.global_rank == 0 else 1.0
    backward(ops, net.loss_a(batch * factor) / 2)
    ops.clip(optimizers[0], 0.01, "norm")
    ops.step(optimizers[0])


def on_engine(strategy: str, raw: bool) -> tuple[torch.Tensor, int, float]:
    chosen: Any = DDPStrategy(shard_optimizer=True) if strategy == "sharded" else strategy
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module = InTrainer(blocked, one, raw)
    trainer = quiet(precision="16-mixed", max_epochs=1, strategy=chosen, devices=ranks)
    result = trainer.fit(module, batches(4 // ranks))
    found = {name: value for name, value, _ in trainer.strategy.whole_parameters()}
    with torch.no_grad():
        whole = torch.cat([getattr(v, "full_tensor", lambda v=v: v)().flatten() for v in found.values()])
    return whole, result.global_step, trainer.scaler.get_scale()


@pytest.mark.everyday(3)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "sharded", "fsdp"])
def test_ranks_are_one_process(ranks: RankPool, strategy: str, raw: bool) -> None:
    """Their two backwards are added up and clipped; where one rank overflows, all leave the step out."""
    alone, steps, scale = on_engine("auto", False)
    for found in ranks(2).run(on_engine, strategy, raw):
        torch.testing.assert_close(found[0], alone, rtol=1e-3, atol=1e-4)
        assert found[1:] == (steps, scale) == (5, 32768.0)
