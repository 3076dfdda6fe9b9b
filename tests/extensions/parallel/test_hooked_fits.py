"""Communication hooks of a fit: what is refused, what is resumed, and ranks whose weights differ for a while."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningModule
from lockstep.extensions.parallel.hooks.compress import fp16
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.local_sgd import PostLocalSGDState, post_local_sgd
from lockstep.extensions.parallel.hooks.powersgd import PowerSGDState, power_sgd
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


def torchs_local(start: int = 2, **given: Any) -> Any:
    return post_localSGD_hook.PostLocalSGDState(None, None, start, **given)


def on_nodes() -> None:
    """Let each rank be a node by itself, as the launcher's variables tell it."""
    node, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=node, GROUP_WORLD_SIZE=world)


# -- what is refused, before anything starts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "ddp_comm_wrapper=fp16.*without ddp_comm_hook"),
        ({"ddp_comm_state": torchs_local()}, "ddp_comm_state=PostLocalSGDState.*without ddp_comm_hook"),
        (
            {"ddp_comm_state": torchs_local(8), "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook},
            "without model_averaging_period: from round 8",
        ),
        (
            {"ddp_comm_hook": PowerSGDState(), "ddp_comm_state": power_sgd},
            r"ddp_comm_hook=PowerSGDState\(...\)\): a hook is a function",
        ),
        (
            {"ddp_comm_hook": power_sgd, "ddp_comm_state": PowerSGDState(), "ddp_comm_wrapper": fp16},
            "ddp_comm_wrapper=fp16.*a function that takes a hook",
        ),
        (
            {"ddp_comm_hook": fp16, "ddp_comm_state": PostLocalSGDState(8), "model_averaging_period": 4},
            "fp16 has the state of type PostLocalSGDState",
        ),
        ({"ddp_comm_hook": fp16, "model_averaging_period": 0}, "model_averaging_period=0"),
        ({"ddp_comm_hook": fp16, "model_averaging_period": -4}, "model_averaging_period=-4"),
        ({"ddp_comm_hook": fp16, "outer_optimizer": {}}, "outer_optimizer={}.*local steps"),
        (
            {
                "ddp_comm_state": PostLocalSGDState(8),
                "ddp_comm_hook": post_local_sgd,
                "model_averaging_period": 4,
                "outer_optimizer": {"rate": 0.7},
            },
            "outer_optimizer=.*'rate'.*lr, momentum, nesterov",
        ),
    ],
)
def test_arguments_that_lack_each_other(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        DDPStrategy(**given)


def test_a_period_without_local_steps_is_told_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="model_averaging_period=4.*no effect"):
        DDPStrategy(ddp_comm_hook=fp16, model_averaging_period=4)


def refused(given: dict[str, Any], make: Any = Slope) -> str:
    steps: list[int] = []

    class Noted(make):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises((MisconfigurationException, TypeError, ValueError)) as error:
        quiet(strategy=DDPStrategy(**given), devices=2, max_steps=2).fit(Noted(), numbers(8))
    assert steps == []
    return str(error.value)


def no_hook(state: Any) -> Any:
    return state


def test_a_hook_that_cannot_work_is_refused_before_the_first_step(ranks: RankPool) -> None:
    for hook, wanted in (
        (quantization_pertensor_hook, "works with NCCL only.*lockstep.engines.ddp.hooks.power_sgd"),
        (no_hook, "no_hook"),
        (powerSGD_hook.powerSGD_hook, "PowerSGDState"),
    ):
        for text in ranks(2).run(refused, {"ddp_comm_hook": hook}):
            assert re.search(wanted, text), text


class Sharding(Slope):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def test_an_optimizer_that_spreads_over_ranks_by_itself_is_refused(ranks: RankPool) -> None:
    given = {
        "ddp_comm_state": torchs_local(),
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "model_averaging_period": 2,
    }
    for said in ranks(2).run(refused, given, Sharding):
        assert "ZeroRedundancyOptimizer" in said


# -- numbers


def test_every_hook_is_applied_on_gloo(ranks: RankPool) -> None:
    """Lightning leaves hooks out where there is no CUDA device, and says nothing."""
    for gradients in ranks(2).run(doubled):
        assert gradients == [2 * mean for mean in (1.5, 3.5, 5.5, 7.5)]


def doubling(state: Any, bucket: GradBucket) -> Any:
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])  # not divided by 2


def doubled() -> list[float]:
    module = Slope()
    quiet(strategy=DDPStrategy(ddp_comm_hook=doubling), devices=2, max_epochs=1).fit(module, numbers(8))
    return module.gradients


def local_weights(nodes: bool, **given: Any) -> tuple[list[float], float]:
    """The weight after each step, and when the fit is over."""
    if nodes:
        on_nodes()
    weights: list[float] = []

    class Noting(Slope):
        def on_train_batch_end(self, *_: Any) -> None:
            weights.append(self.w.item())

    strategy = DDPStrategy(**given)
    module = Noting(lr=1.0)
    places = {"devices": 1, "num_nodes": 2} if nodes else {"devices": 2}
    quiet(strategy=strategy, max_epochs=1, **places).fit(module, numbers(16))
    return weights, module.w.item()


def by_hand(start: int, period: int, steps: int) -> tuple[list[list[float]], float]:
    """Ranks 0 and 1 draw the odd and the even numbers; the gradient is the number."""
    weights = [0.0, 0.0]
    tapes: list[list[float]] = [[], []]
    for step in range(steps):
        gradients = [2.0 * step + 1, 2.0 * step + 2]
        for rank in (0, 1):
            weights[rank] -= sum(gradients) / 2 if step < start else gradients[rank]
        if step >= start and (step - start) % period == 0:
            weights = [sum(weights) / 2] * 2
        for rank in (0, 1):
            tapes[rank].append(weights[rank])
    return tapes, sum(weights) / 2


LOCAL_HOOKS: dict[str, Any] = {
    "torch's": lambda: {
        "ddp_comm_state": torchs_local(2),
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
    },
    "torch's, wrapped": lambda: {
        "ddp_comm_state": torchs_local(2),
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "lockstep's": lambda: {"ddp_comm_state": PostLocalSGDState(2), "ddp_comm_hook": post_local_sgd},
}


@pytest.mark.parametrize("hook", LOCAL_HOOKS)
def test_local_steps_on_two_nodes_by_hand(ranks: RankPool, hook: str) -> None:
    """When the fit is over every rank has the mean, although the last average was two steps ago."""
    tapes, mean = by_hand(start=2, period=3, steps=8)
    assert len({tuple(tape[-1:]) for tape in tapes}) == 2
    given = {**LOCAL_HOOKS[hook](), "model_averaging_period": 3}
    for rank, (weights, last) in enumerate(ranks(2).run(lambda: local_weights(True, **given))):
        assert weights == tapes[rank]
        assert last == mean


def test_ranks_by_themselves_by_hand(ranks: RankPool) -> None:
    tapes, _ = by_hand(start=2, period=3, steps=8)
    for state, hook in (
        (PostLocalSGDState(2, local_allreduce=False), post_local_sgd),
        (torchs_local(2, post_local_gradient_allreduce=False), post_localSGD_hook.post_localSGD_hook),
    ):
        given = {"ddp_comm_state": state, "ddp_comm_hook": hook, "model_averaging_period": 3}
        for rank, (weights, _) in enumerate(ranks(2).run(lambda given=given: local_weights(False, **given))):
            assert weights == tapes[rank]


def test_an_outer_optimizer_by_hand(ranks: RankPool) -> None:
    """SGD with lr 0.5 on how far the ranks have come on average, every 3 local steps."""
    weights, begun, tapes = [0.0, 0.0], 0.0, [[], []]  # type: ignore[var-annotated]
    for step in range(8):
        gradients = [2.0 * step + 1, 2.0 * step + 2]
        for rank in (0, 1):
            weights[rank] -= sum(gradients) / 2 if step < 2 else gradients[rank]
        if step < 2:
            begun = weights[0]
        elif (step + 1 - 2) % 3 == 0:
            begun -= 0.5 * (begun - sum(weights) / 2)
            weights = [begun] * 2
        for rank in (0, 1):
            tapes[rank].append(weights[rank])
    given = {
        "ddp_comm_state": PostLocalSGDState(2, local_allreduce=False),
        "ddp_comm_hook": post_local_sgd,
        "model_averaging_period": 3,
        "outer_optimizer": {"lr": 0.5, "momentum": 0.0},
    }
    for rank, (found, last) in enumerate(ranks(2).run(lambda: local_weights(False, **given))):
        assert found == tapes[rank]
        assert last == sum(weights) / 2


class Two(LightningModule):
    """Two parameters, each with its optimizer; notes both after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.after: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, parameter in zip(self.optimizers(), (self.a, self.b), strict=True):
            optimizer.zero_grad()
            self.manual_backward((parameter * batch).mean())
            optimizer.step()
            self.after.append((self.a.item(), self.b.item()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.a, self.b)]


def with_two_optimizers() -> list[tuple[float, float]]:
    module = Two()
    given = {"ddp_comm_state": PostLocalSGDState(2, local_allreduce=False), "ddp_comm_hook": post_local_sgd}
    strategy = DDPStrategy(model_averaging_period=4, **given)
    quiet(strategy=strategy, devices=2, max_epochs=1).fit(module, numbers(12))
    return module.after


def test_with_two_optimizers_each_step_counts_and_all_parameters_are_averaged(ranks: RankPool) -> None:
    """Lightning averages those of the optimizer that steps, so that with an even period one of two is left out."""
    zero, one = ranks(2).run(with_two_optimizers)
    alike = [mine == theirs for mine, theirs in zip(zero, one, strict=True)]
    # a and b in turn: the first batch is everybody's, then a's update is followed by an average every second time
    assert alike == [True, True, True, False, False, False, True, False, False, False, True, False]


# -- who looks at the model while weights differ


class Normed(LightningModule):
    """With buffers and momentum; notes its weights after each step and in each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        self.sometimes = nn.Linear(3, 1)
        self.after: list[list[Tensor]] = []
        self.validated: list[list[Tensor]] = []

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in (*self.parameters(), *self.buffers())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        out = self.net(x).squeeze(1)
        if (batch_idx + self.global_rank) % 3 == 0:
            out = out + self.sometimes(x).squeeze(1)
        return (out - x.sum(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.state())

    def on_train_batch_end(self, *_: Any) -> None:
        self.after.append(self.state())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data(count: int = 54) -> Any:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x), batch_size=3, shuffle=True)


class Saves(Callback):
    """Saves after some steps."""

    def __init__(self, folder: str, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


HOOKS: dict[str, Any] = {
    "torch's PowerSGD": lambda: {
        "ddp_comm_state": powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
    },
    "PowerSGD": lambda: {"ddp_comm_state": PowerSGDState(rank=1, start=2), "ddp_comm_hook": power_sgd},
    "torch's local steps": lambda: {
        "ddp_comm_state": torchs_local(2),
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "model_averaging_period": 3,
    },
    "local steps": lambda: {
        "ddp_comm_state": PostLocalSGDState(2, local_allreduce=False),
        "ddp_comm_hook": post_local_sgd,
        "model_averaging_period": 3,
    },
    "an outer optimizer": lambda: {
        "ddp_comm_state": PostLocalSGDState(1, local_allreduce=False),
        "ddp_comm_hook": post_local_sgd,
        "model_averaging_period": 3,
        "outer_optimizer": {},
    },
}


def trained(
    name: str, folder: str, resume: int | None = None, validate: int | None = None, saves: Any = (4, 5, 6)
) -> Normed:
    """Eight steps, from the beginning or from a checkpoint."""
    on_nodes()
    torch.manual_seed(11)
    module = Normed()
    world = int(os.environ["WORLD_SIZE"])
    trainer = quiet(
        strategy=DDPStrategy(**HOOKS[name]()),
        num_nodes=world,
        devices=1,
        max_steps=8,
        max_epochs=-1,
        val_check_interval=validate,
        limit_val_batches=2 if validate else 0,
        num_sanity_val_steps=0,
        callbacks=[Saves(folder, *saves)] if resume is None else [],
    )
    trainer.seed = 3
    trainer.fit(module, data(), data(12), ckpt_path=None if resume is None else f"{folder}/{resume}.ckpt")
    module.after.append(module.state())
    return module


def states(name: str, folder: str, *args: Any, **kwargs: Any) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    module = trained(name, folder, *args, **kwargs)
    return module.after, module.validated


def same(mine: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = [pair for one, other in zip(mine, theirs, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def fitted(start: str) -> list[Tensor]:
    torch.manual_seed(11)
    module = Normed()
    strategy = DDPStrategy(start_method=start, **HOOKS["torch's PowerSGD"]())
    trainer = quiet(strategy=strategy, devices=2, max_steps=8, max_epochs=-1)
    trainer.seed = 3
    trainer.fit(module, data())
    return [parameter.detach() for parameter in module.parameters()]


def test_a_state_of_torchs_is_unpickled_without_a_default_group() -> None:
    """PowerSGDState looks it up, and a spawned rank has none yet: "ddp_spawn" failed."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3)
    found = pickle.loads(pickle.dumps(DDPStrategy(ddp_comm_hook=powerSGD_hook.powerSGD_hook, ddp_comm_state=state)))
    assert found._hook.state.matrix_approximation_rank == 3
    assert found._hook.state.process_group is None


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_the_memory_of_torchs_powersgd_travels_to_processes(ranks: RankPool, start: str) -> None:
    assert all(map(torch.equal, fitted(start), ranks(2).run(fitted, "popen", timeout=60)[0]))


@pytest.mark.everyday(2)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(ranks: RankPool, hook: str, tmp_path: Path) -> None:
    """At a moment when weights and optimizers of the ranks differ, too: every rank's own are in the checkpoint."""
    straight = ranks(2).run(states, hook, str(tmp_path), timeout=60)
    for step in (4, 6):
        resumed = ranks(2).run(states, hook, str(tmp_path), step, timeout=60)
        for (whole, _), (rest, _) in zip(straight, resumed, strict=True):
            assert same(whole[step:], rest)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("hook", ["torch's local steps", "an outer optimizer"])
def test_a_validation_sees_the_mean_and_changes_nothing(ranks: RankPool, hook: str, tmp_path: Path) -> None:
    without = ranks(2).run(states, hook, str(tmp_path), timeout=60)
    looked = ranks(2).run(states, hook, str(tmp_path), None, 1, timeout=60)
    (zero, seen_by_zero), (one, seen_by_one) = looked
    for (plain, _), (after, _) in zip(without, looked, strict=True):
        assert same(plain, after)
    assert same(seen_by_zero, seen_by_one)
    parameters = len(list(Normed().parameters()))
    parted = 0
    for seen, mine, theirs in zip(seen_by_zero, zero, one, strict=False):
        parted += not same([mine], [theirs])
        for place, tensor in enumerate(seen):
            mean = (mine[place] + theirs[place]) / 2 if place < parameters else mine[place]
            assert torch.allclose(tensor, mean, rtol=1e-6, atol=0)
    assert parted >= 3


def test_a_checkpoint_holds_the_mean(ranks: RankPool, tmp_path: Path) -> None:
    """The file is one model, which others load; with another number of ranks a fit goes on from it."""
    (zero, _), (one, _) = ranks(2).run(states, "local steps", str(tmp_path), timeout=60)
    assert not same([zero[3]], [one[3]])
    saved = torch.load(tmp_path / "4.ckpt", "cpu", weights_only=True)
    names = [name for name, _ in Normed().named_parameters()]
    for name, mine, theirs in zip(names, zero[3], one[3], strict=False):
        assert torch.allclose(saved["state_dict"][name], (mine + theirs) / 2, rtol=1e-6, atol=0)
    three = ranks(3).run(states, "local steps", str(tmp_path), 4, timeout=60)
    assert len(three[0][0]) == 8 - 4 + 1
    assert all(same([after[-1]], [three[0][0][-1]]) for after, _ in three)


def test_when_the_fit_is_over_every_rank_has_the_mean_and_can_still_save(ranks: RankPool, tmp_path: Path) -> None:
    def saved_after() -> list[Tensor]:
        module = trained("local steps", str(tmp_path))
        module.trainer.save_checkpoint(f"{tmp_path}/after.ckpt")
        return module.state()

    zero, one = ranks(2).run(saved_after, timeout=60)
    assert same([zero], [one])
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    own = [rank["apart"]["tensors"] for rank in saved["lockstep"]["strategy of ranks"]]
    for name, mean in zip((name for name, _ in Normed().named_parameters()), zero, strict=False):
        assert torch.equal(saved["state_dict"][name], mean)
        assert torch.allclose((own[0][name] + own[1][name]) / 2, mean, rtol=1e-6, atol=0)
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])


class SavesAlone(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            trainer.fit_loop.save_alone(f"{self.folder}/alone.ckpt")


def test_a_rank_that_saves_alone_asks_nobody(ranks: RankPool, tmp_path: Path) -> None:
    """It holds the rank's own weights, and what its hook remembers."""

    def alone() -> list[Tensor]:
        on_nodes()
        module, saves = Normed(), SavesAlone(str(tmp_path))
        strategy = DDPStrategy(**HOOKS["local steps"]())
        trainer = quiet(strategy=strategy, num_nodes=2, devices=1, max_steps=6, max_epochs=-1, callbacks=[saves])
        trainer.fit(module, data())
        return module.after[4]

    _, one = ranks(2).run(alone, timeout=60)
    saved = torch.load(tmp_path / "alone.ckpt", "cpu", weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], one[0])
    assert saved["lockstep"]["strategy of ranks"] == [{"hook": {"iteration": 5}}]


# -- what it is made of


def autograd_hooks(again: bool) -> int:
    """How many a parameter has in training, where optimizers were made anew before the first step (a tuner does)."""

    class Counts(Slope):
        def on_fit_start(self) -> None:
            strategy = self.trainer.strategy
            for _ in range(again):
                strategy.setup_optimizers(strategy.optimizers, strategy.lr_scheduler_configs)

        def on_train_batch_end(self, *_: Any) -> None:
            self.hooks = len(self.w._post_accumulate_grad_hooks)

    module = Counts(lr=0.1)
    quiet(strategy=DDPStrategy(ddp_comm_hook=fp16), devices=2, max_epochs=1).fit(module, numbers(16))
    return module.hooks


def test_optimizers_that_are_made_anew_let_the_first_reducer_go(ranks: RankPool) -> None:
    """Its autograd hooks once stayed on the parameters beside those of the second."""
    assert ranks(2).run(autograd_hooks, True) == ranks(2).run(autograd_hooks, False) == [1, 1]


def twice() -> list[int]:
    on_nodes()
    strategy = DDPStrategy(**HOOKS["torch's local steps"]())
    seen = []
    for _ in range(2):
        quiet(strategy=strategy, num_nodes=2, devices=1, max_steps=4, max_epochs=-1).fit(Normed(), data())
        assert strategy._hook.state.subgroup is None
        seen.append(strategy._hook.state.iter)
    return seen


def test_a_second_fit_goes_on_with_the_state(ranks: RankPool) -> None:
    """What its hook has counted is past the start: its steps are local from the first on, and averaged from there."""
    assert ranks(2).run(twice, timeout=60) == [[2, 2], [2, 2]]
