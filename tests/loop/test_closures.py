"""Optimizers that are stepped by a closure, and the methods of a module that take a part of the step over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import DDPStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankFailure, RankPool


class Fit(LightningModule):
    """Linear regression by LBFGS with its line search, which evaluates the loss as often as it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.steps = 0
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=8, line_search_fn="strong_wolfe")


def samples(count: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 3 + x[:, :1] ** 2
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def solve(batch_size: int, accumulate: int = 1, ranks: bool = False) -> tuple[list[float], int, int, float]:
    module = Fit()
    trainer = (on_ranks if ranks else quiet)(max_epochs=3, accumulate_grad_batches=accumulate)
    trainer.fit(module, samples(13, batch_size))
    weights = [value for parameter in module.parameters() for value in parameter.flatten().tolist()]
    return weights, module.steps, trainer.global_step, trainer.callback_metrics["loss"].item()


def test_lbfgs_sees_the_whole_window_in_each_of_its_calls() -> None:
    weights, calls, steps, _ = solve(13)
    again, more_calls, more_steps, _ = solve(5, accumulate=3)
    assert steps == more_steps == 3
    assert more_calls == 3 * calls > 3 * steps
    assert again == pytest.approx(weights, rel=1e-7)


def test_lbfgs_logs_each_batch_once() -> None:
    log = lambda m, *_: m.log("batches", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")  # noqa: E731
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(acting(Fit, training_step=log), samples(13, 5))
    assert trainer.callback_metrics["batches"] == 3


class Shows(Fit):
    """Notes what it computed in each call, and what was shown after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []
        self.shown: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.calls.append(loss.item())
        self.log("newest", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append((float(self.trainer.callback_metrics["newest"]), float(outputs["loss"])))
        self.losses.append(self.calls[-1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_logs_the_last_call_of_its_closure(accumulate: int) -> None:
    """The first call's values were kept, of the weights before the update; Lightning has the last call's."""
    module = Shows()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, samples(12, 3))
    assert len(module.calls) > 8
    assert module.shown == [(loss, pytest.approx(loss / accumulate)) for loss in module.losses]
    assert trainer.callback_metrics["loss"].item() == pytest.approx(sum(module.losses) / 4)


def test_lbfgs_goes_the_same_way_on_all_ranks(ranks: RankPool) -> None:
    """With their own losses the line searches part, and a rank waits for calls that never come."""
    first, second = ranks(2).run(solve, 4, 2, True, timeout=40)
    assert first == second
    assert first[0] == pytest.approx(solve(13)[0], rel=1e-6)


class FitByHand(Fit):
    """The same in manual optimization.

    Args:
        plain: step torch's optimizer itself.
    """

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain = plain

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.plain)
        x, y = batch

        def closure() -> Any:
            self.steps += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.layer(x), y)
            self.manual_backward(loss)
            return loss

        self.losses.append(float(optimizer.step(closure)))


def solve_by_hand(batch_size: int, plain: bool = False, ranks: bool = False) -> tuple[list[float], list[float], int]:
    module = FitByHand(plain)
    (on_ranks if ranks else quiet)(max_epochs=3).fit(module, samples(13, batch_size))
    weights = [value for parameter in module.parameters() for value in parameter.flatten().tolist()]
    return weights, module.losses[::2], module.steps  # in every second batch one rank has no sample: not noted there


@pytest.mark.parametrize("plain", [False, True])
def test_lbfgs_by_hand_goes_the_same_way_on_all_ranks(ranks: RankPool, plain: bool) -> None:
    """Each rank's line search saw its own loss: the ranks' weights parted in silence."""
    alone = solve_by_hand(12)
    found = ranks(2).run(solve_by_hand, 6, plain, True, timeout=40)
    for weights, losses, _ in found:
        assert weights == found[0][0]
        assert weights == pytest.approx(alone[0], rel=1e-8)
        assert losses[0] == pytest.approx(alone[1][0], rel=1e-12)
    assert found[0][2] == alone[2]


def test_lbfgs_with_returned_weights_searches_along_its_own_gradient() -> None:
    class Weighs(Fit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "weight": 10 * len(batch[0])}

    weights = solve(13)[0]
    module = Weighs()
    quiet(max_epochs=3, accumulate_grad_batches=3).fit(module, samples(13, 5))
    found = [value for parameter in module.parameters() for value in parameter.flatten().tolist()]
    assert found == pytest.approx(weights, rel=1e-7)


# -- methods of the module ---------------------------------------------------------------------------------


class Warms(Slope):
    """Sets the learning rate in its own `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.validated.append(batch_idx)
        optimizer.param_groups[0]["lr"] = 0.1 * (self.global_step + 1)
        optimizer.step(closure=optimizer_closure)


def test_a_module_may_step_the_optimizer_itself() -> None:
    module = Warms()
    result = quiet(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=4.0).fit(module, numbers(5))
    assert (module.validated, module.gradients, result.global_step) == ([1, 3, 4], [1.5, 3.5, 5.0], 3)
    assert module.w.item() == pytest.approx(-(0.1 * 1.5 + 0.2 * 3.5 + 0.3 * 4.0), rel=1e-5)


def test_and_on_ranks_too(ranks: RankPool) -> None:
    def warm() -> tuple[list[float], float]:
        module = Warms()
        on_ranks(max_epochs=1).fit(module, numbers(5))
        return module.gradients, module.w.item()

    expected = pytest.approx(-(0.1 * 1.5 + 0.2 * 3.5 + 0.3 * 5.0))
    assert ranks(2).run(warm) == [([1.5, 3.5, 5.0], expected)] * 2


def test_a_skipped_update_is_a_step_of_the_fit() -> None:
    """`global_step` stood still, so that `max_steps` was never reached; Lightning counts windows here."""

    class Looks(Slope):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()

    module = Looks(lr=1.0)
    result = quiet(max_steps=3).fit(module, numbers(5))
    assert (module.gradients, module.w.item(), result.global_step) == ([1.0, 2.0, 3.0], 0.0, 3)


def test_an_optimizer_step_without_its_closure_is_refused() -> None:
    module = acting(optimizer_step=lambda m, epoch, at, optimizer, closure: optimizer.step() or True)
    with pytest.raises(MisconfigurationException, match="optimizer_closure"):
        quiet(max_epochs=1).fit(module, numbers(1))


class PassesOn(torch.optim.SGD):
    """A wrapper that needs the closure, which its signature does not name."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().step(args[0] if args else kwargs["closure"])


class Ignores(torch.optim.SGD):
    """A wrapper that steps without the closure, whatever it is given."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().step()


class DropsFirst(PassesOn):
    """Drops the gradients before it passes the closure on."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.zero_grad()
        return super().step(*args, **kwargs)


class Climbs(torch.optim.SGD):
    """Sharpness-aware: the gradient that counts is the one at weights that the first gradient has moved."""

    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        kwargs["closure"]()
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            for p in parameters:
                p.add_(p.grad, alpha=0.1)
        loss = kwargs["closure"]()
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        super().step()
        return loss


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_optimizer_whose_step_takes_any_arguments_gets_the_closure_and_may_ignore_it(precision: Any) -> None:
    def trained(kind: Any) -> tuple[list[float], list[int]]:
        class Net(Fit):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return super().training_step([part.float() for part in batch], batch_idx)

            def configure_optimizers(self) -> Any:
                return kind(self.parameters(), lr=0.1)

        module = Net()
        trainer = quiet(max_epochs=2, accumulate_grad_batches=2, precision=precision, non_finite="ignore")
        trainer.fit(module, samples(13, 4))
        return [value for p in module.parameters() for value in p.flatten().tolist()], [module.steps]

    expected, calls = trained(torch.optim.SGD)
    for kind in (PassesOn, Ignores):
        assert trained(kind) == (expected, calls)
    assert trained(DropsFirst)[0] == expected
    assert trained(Climbs)[0] != expected


def test_such_an_optimizer_on_ranks_trains_what_one_process_trains(ranks: RankPool) -> None:
    def trained(on_ranks_too: bool) -> list[float]:
        class Net(Fit):
            def configure_optimizers(self) -> Any:
                return Climbs(self.parameters(), lr=0.1)

        module = Net()
        trainer = (on_ranks if on_ranks_too else quiet)(max_epochs=2)
        trainer.fit(module, samples(12, 3 if on_ranks_too else 6))
        return [value for p in module.parameters() for value in p.flatten().tolist()]

    for weights in ranks(2).run(trained, True):
        assert weights == pytest.approx(trained(False), rel=1e-12)


def test_a_module_may_drop_the_gradients_itself() -> None:
    class Keeps(Slope):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            self.validated.append(batch_idx)

    module = Keeps()
    quiet(max_epochs=1).fit(module, numbers(3))
    assert (module.validated, module.gradients) == ([0, 1, 2], [1.0, 3.0, 6.0])


def doubled(start: Any = on_ranks, count: int = 4) -> list[float]:
    module = acting(backward=lambda m, loss, *_: (2 * loss).backward() or True)
    start(max_epochs=1).fit(module, numbers(count))
    return module.gradients


def test_a_module_may_do_the_backward_itself(ranks: RankPool) -> None:
    assert doubled(quiet, 2) == [2.0, 4.0]
    assert ranks(2).run(doubled) == [[3.0, 7.0]] * 2


def test_no_optimizer_leaves_the_weights_alone() -> None:
    module = type("Frozen", (Slope,), {"configure_optimizers": lambda self: None})()
    with pytest.warns(UserWarning, match="updates no parameters"):
        quiet(max_epochs=1).fit(module, numbers(2))
    assert (len(module.batches), module.w.item()) == (2, 0.0)


# -- Optimizers that take the place of others in the middle of a fit step from there on, on one process and on ran


WAYS = ["trainer.optimizers", "strategy.optimizers", "an item"]
WHEN = ["on_train_epoch_start", "on_train_batch_start"]


def put(module: Any, optimizer: Any, way: str) -> None:
    if way == "trainer.optimizers":
        module.trainer.optimizers = [optimizer]
    elif way == "an item":
        module.trainer.optimizers[0] = optimizer
    else:
        module.trainer.strategy.optimizers = [optimizer]


class Changes(LightningModule):
    """Steps by Adam; in the second epoch it gets SGD, and in one process a layer."""

    def __init__(self, way: str, when: str, manual: bool = False, grows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.automatic_optimization = not manual
        self.way, self.when, self.grows, self.changed = way, when, grows, False

    def change(self, hook: str) -> None:
        if self.changed or hook != self.when or self.current_epoch == 0:
            return
        self.changed = True
        if self.grows:
            torch.manual_seed(7)
            self.net.append(nn.Linear(1, 1).double().to(self.device))
        put(self, torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9), self.way)

    def on_train_epoch_start(self) -> None:
        self.change("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change("on_train_batch_start" if batch_idx == 1 else "")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader(world: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6 // world)


def changed(way: str, when: str, manual: bool, grows: bool = False) -> list[torch.Tensor]:
    module = Changes(way, when, manual, grows)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = quiet(max_epochs=3) if world == 1 else on_ranks(max_epochs=3)
    trainer.fit(module, loader(world))
    assert isinstance(trainer.optimizers[0], torch.optim.SGD)
    assert trainer.optimizers[0].state, "it never stepped"
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("when", WHEN)
def test_optimizers_that_were_replaced_within_a_fit_never_stepped(ranks: RankPool, when: str, manual: bool) -> None:
    """The old ones went on, without a word."""
    expected = changed(WAYS[0], when, manual)
    for found in ranks(2).run(changed, WAYS[1], when, manual, timeout=40):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_replace_them_is_taken(way: str) -> None:
    found, expected = (changed(one, WHEN[0], False, grows=True) for one in (way, WAYS[1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def sharded() -> None:
    trainer = quiet(max_epochs=2, devices=2, strategy=DDPStrategy(shard_optimizer=True))
    trainer.fit(Changes(WAYS[0], WHEN[0]), loader(2))


def on_rank_0_alone() -> None:
    class Alone(Changes):
        def change(self, hook: str) -> None:
            if self.global_rank == 0:
                super().change(hook)

    on_ranks(max_epochs=2).fit(Alone(WAYS[0], WHEN[0]), loader(2))


def test_what_cannot_be_replaced_is_refused_by_name(ranks: RankPool) -> None:
    with pytest.raises(Exception, match=r"optimizers were replaced during a fit, .*shard_optimizer=True\)"):
        ranks(2).run(sharded, timeout=40)
    with pytest.raises(RankFailure, match=r"parameter 'net\.3\.weight' was added after set-up"):
        ranks(2).run(changed, WAYS[0], WHEN[0], False, True, timeout=40)
    with pytest.raises(
        RankFailure, match=r"What is trained is not the same on every rank: rank 0 has SGD of net\.0\.weight"
    ):
        ranks(2).run(on_rank_0_alone, timeout=40)

    class Searches(Changes):
        def change(self, hook: str) -> None:
            if self.current_epoch:
                put(self, torch.optim.LBFGS(self.parameters()), WAYS[0])

    with pytest.raises(MisconfigurationException, match="LBFGS, which needs a closure, cannot replace Adam"):
        quiet(max_epochs=2).fit(Searches(WAYS[0], WHEN[0]), loader(1))


def by_flag(foreach: bool | None) -> Any:
    """Its optimizer says how parameters are updated, or leaves that to torch."""
    return acting(configure_optimizers=lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=foreach))


@pytest.mark.parametrize(("before", "after"), [(None, False), (None, True), (False, None)])
def test_how_torch_updates_parameters_may_be_chosen_between_two_runs(before: Any, after: Any, tmp_path: Any) -> None:
    """A checkpoint where torch had chosen was taken for a malformed one: so was each of `fsdp` on a device."""
    trainer = quiet(max_steps=1)
    trainer.fit(by_flag(before), numbers(4))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = quiet(max_steps=2)
    resumed.fit(by_flag(after), numbers(4), ckpt_path=tmp_path / "one.ckpt")
    assert resumed.global_step == 2
