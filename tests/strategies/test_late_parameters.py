"""Parameters and buffers that come after set-up: all ranks reduce them from then on, or an error names them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import Callback
from lockstep.parallel.hooks.compress import allreduce
from lockstep.parallel.hooks.local_sgd import PostLocalSGDState, post_local_sgd
from lockstep.strategies import DDPStrategy
from lockstep.testing import RankPool, check_equivalence
from lockstep.testing.pool import RankFailure
from tests.loop.pieces import quiet

pytestmark = pytest.mark.timeout(90)

ENGINES: dict[str, dict[str, Any]] = {
    "in shared memory": {},
    "over TCP": {"shared_memory": False},
    "static graph": {"static_graph": True},
    "static graph over TCP": {"static_graph": True, "shared_memory": False},
    "check_reduction": {"check_reduction": True},
    "without views": {"gradient_as_bucket_view": False},
    "many buckets": {"bucket_cap_mb": 1e-4},
    "sharded optimizer": {"shard_optimizer": True},
    "sharded optimizer over TCP": {"shard_optimizer": True, "shared_memory": False},
    "communication hook": {"ddp_comm_hook": allreduce},
    "local steps to come": {
        "ddp_comm_state": PostLocalSGDState(start=1000),
        "ddp_comm_hook": post_local_sgd,
        "model_averaging_period": 4,
    },
}


class Grows(LightningModule):
    """Gets parameters and buffers while it trains, with other values on each rank: rank 0's have to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 1)
        self.frozen = nn.Linear(6, 5).requires_grad_(False)
        self.plain: list[Tensor] = []  # which only the optimizer knows

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = (self.body(x) + self.frozen(x)).tanh()
        if hasattr(self, "scale"):
            hidden = hidden * self.scale
        if hasattr(self, "more"):
            hidden = self.more(hidden)
        for factor in self.plain:
            hidden = hidden * factor
        if hasattr(self, "shift"):
            hidden = hidden + self.shift
        return nn.functional.mse_loss(self.head(hidden), y)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)

    def drawn(self) -> Tensor:
        return 1 + 0.1 * torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(self.global_rank))

    def grow(self, how: str) -> None:
        torch.manual_seed(1000 + self.global_rank)
        GROWTHS[how](self, self.trainer.strategy.optimizers[0])


def _attribute(net: Any, optimizer: Any) -> None:
    net.scale = nn.Parameter(net.drawn())
    optimizer.add_param_group({"params": [net.scale]})


def _appended(net: Any, optimizer: Any) -> None:
    net.scale = nn.Parameter(net.drawn())
    optimizer.param_groups[0]["params"].append(net.scale)


def _module(net: Any, optimizer: Any) -> None:
    net.more = nn.Linear(5, 5).double()
    optimizer.add_param_group({"params": net.more.parameters(), "lr": 0.05})


def _inserted(net: Any, optimizer: Any) -> None:
    net.more = nn.Sequential()
    net.more.insert(0, nn.Linear(5, 5).double())  # of which torch does not tell
    optimizer.add_param_group({"params": net.more.parameters()})


def _head(net: Any, optimizer: Any) -> None:
    net.head = nn.Linear(5, 1).double()
    optimizer.add_param_group({"params": net.head.parameters()})


def _weight_norm(net: Any, optimizer: Any) -> None:
    nn.utils.parametrizations.weight_norm(net.body)
    optimizer.add_param_group({"params": [p for name, p in net.body.named_parameters() if "original" in name]})


def _assigned(net: Any, optimizer: Any) -> None:
    net.load_state_dict({name: value / 2 for name, value in net.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"][:] = [*net.body.parameters(), *net.head.parameters()]


def _thawed(net: Any, optimizer: Any) -> None:
    net.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": net.frozen.parameters()})


def _plain(net: Any, optimizer: Any) -> None:
    net.plain.append(net.drawn().requires_grad_())
    optimizer.add_param_group({"params": net.plain[-1:]})


def _buffer(net: Any, optimizer: Any) -> None:
    net.register_buffer("shift", net.drawn())


GROWTHS: dict[str, Callable[[Any, Any], None]] = {
    "attribute": _attribute,
    "appended": _appended,
    "module": _module,
    "inserted": _inserted,
    "head": _head,
    "weight_norm": _weight_norm,
    "assigned": _assigned,
    "thawed": _thawed,
    "plain": _plain,
    "buffer": _buffer,
}
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
)

OF_SAMPLES = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")


class Grow(Callback):
    """Lets the module grow, once, in a hook, after so many steps, on some ranks."""

    def __init__(self, how: str, hook: str, after: int, on: Sequence[int] = range(9)) -> None:
        self.how, self.hook, self.after, self.on = how, hook, after, on
        setattr(self, hook, self._grow)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.done = False

    def _grow(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        enough = trainer.global_step >= self.after + (self.hook == "on_train_batch_end")
        if enough and not self.done and trainer.global_rank in self.on:
            self.done = True
            pl_module.grow(self.how)


for _name in HOOKS:  # so that they count as overridden
    setattr(Grow, _name, lambda *args: None)


def rows(length: int) -> Callable[[int], Any]:
    x = torch.randn(length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return lambda batch_size: DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size, shuffle=True)


Case = tuple[str, str, str, int, int, int, int]


def strays(case: Case, world: int) -> tuple[bool, str]:
    """Whether the module grew, and what differs from one process in the gradients.

    What a hook has added is looked at before all take rank 0's: parameters are not compared.
    """
    engine, how, hook, after, accumulate, batch_size, length = case
    strategy, growth = DDPStrategy(**ENGINES[engine]), Grow(how, hook, after)
    flags = {"accumulate": accumulate, "batch_size": batch_size, "steps": 6, "callbacks": [growth]}
    report = str(check_equivalence(Grows, rows(length), strategy=strategy, devices=world, **flags))
    return growth.done, report if "gradient '" in report or "another course" in report else ""


def cases(count: int, seed: int) -> list[tuple[Case, int]]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        how, hook = list(GROWTHS)[number % len(GROWTHS)], chance.choice(HOOKS)
        early = hook in ("on_fit_start", "on_train_start")
        # one process has no micro-batches, between which something could come
        accumulate = 1 if hook == "on_after_backward" else chance.choice([1, 1, 2, 3])
        engine = list(ENGINES)[number % len(ENGINES)]
        rest = (0 if early else chance.randrange(4), accumulate, chance.choice([2, 3]))
        length, world = chance.choice([13, 23, 24, 25]), chance.choice([1, 2, 2, 3])
        if hook in OF_SAMPLES and 0 < length % (rest[-1] * world) < world:
            length += world  # ranks without samples do not run these hooks
        found.append(((engine, how, hook, *rest, length), world))
    return found


def look(ranks: RankPool, count: int, seed: int) -> None:
    grown = 0
    for world in (1, 2, 3):
        chosen = [case for case, of_world in cases(count, seed) if of_world == world]

        def play(chosen: list[Case] = chosen, world: int = world) -> list[tuple[bool, str]]:
            return [strays(case, world) for case in chosen]

        of_ranks = ranks(world).run(play, group=False, timeout=85)
        for found in of_ranks:
            assert [(case, report) for case, (_, report) in zip(chosen, found, strict=True) if report] == []
        grown += sum(done for done, _ in of_ranks[0])
    assert grown > 0.8 * count


def test_what_comes_after_set_up_is_reduced(ranks: RankPool) -> None:
    """It was not: each rank trained a parameter of its own, and nobody was told."""
    look(ranks, 33, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_what_comes_after_set_up_is_reduced_in_many_cases(ranks: RankPool, seed: int) -> None:
    look(ranks, 110, seed)


def fit(make: Callable[[], Any], options: dict[str, Any], callbacks: list[Any], **flags: Any) -> Any:
    trainer = quiet(
        strategy=DDPStrategy(**options),
        devices=torch.distributed.get_world_size(),
        precision="64-true",
        callbacks=callbacks,
        **{"max_steps": 4, "max_epochs": -1, **flags},
    )
    module = make()
    trainer.fit(module, rows(24)(2))
    return module


OPTIONS: list[dict[str, Any]] = [{}, {"shared_memory": False}, {"shard_optimizer": True}]
CAME = [
    ("attribute", "on_fit_start", "parameter 'scale' came"),
    ("module", "on_train_start", "parameter 'more.weight' came"),
    ("thawed", "on_train_batch_end", "parameter 'frozen.weight' was thawed"),
    ("plain", "on_train_epoch_start", r"parameter \"optimizers[0].param_groups[1]['params'][0]\" came"),
    ("buffer", "on_train_batch_start", "buffer 'shift' came"),
]


# Every day all that may come with the plain options, and each of the other options with two of it.
@pytest.mark.parametrize(
    ("options", "how", "hook", "named"),
    [
        pytest.param(options, *came, marks=() if not turn or (place + turn) % 3 == 0 else pytest.mark.slow)
        for turn, options in enumerate(OPTIONS)
        for place, came in enumerate(CAME)
    ],
)
def test_what_comes_on_one_rank_is_an_error_there(
    ranks: RankPool, options: dict[str, Any], how: str, hook: str, named: str
) -> None:
    """The ranks' reductions no longer matched: they hung, or one took another's gradients for its own."""
    with pytest.raises(RankFailure, match=re.escape(f"rank 1: {named}").replace('\\"', '"')) as caught:
        ranks(3).run(lambda: fit(Grows, options, [Grow(how, hook, int("batch" in hook), on=[1])]), timeout=20)
    assert caught.value.rank == 1


class FreezesInItsWindow(Grows):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.current_epoch:
            self.grow("weight_norm")
            self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], 0.1, 0.9, weight_decay=0.1)


@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("local")])
def test_what_is_frozen_within_a_window_is_stepped_once(ranks: RankPool, engine: str) -> None:
    """A static graph took the gradient that the window held for one that each later backward gives.

    A sharded optimizer moved the weight to a buffer, and the frozen parameter that lay in its memory stayed behind.
    """

    def values(world: int) -> dict[str, Tensor]:
        trainer = quiet(
            strategy=DDPStrategy(**ENGINES[engine]) if world > 1 else "auto",
            devices=world,
            precision="64-true",
            accumulate_grad_batches=2,
            max_epochs=2,
        )
        trainer.seed = 3
        torch.manual_seed(7)
        module = FreezesInItsWindow()
        trainer.fit(module, rows(24)(4 // world))
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    (expected,) = ranks(1).run(lambda: values(1), group=False)
    for found in ranks(2).run(lambda: values(2)):
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-12, msg=name)


class GrowsInItsStep(Grows):
    equal = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 1 and not hasattr(self, "scale"):
            self.grow("attribute")
            if self.equal:
                nn.init.constant_(self.scale, 1.1)
        return super().training_step(batch, batch_idx)


class GrowsAlikeInItsStep(GrowsInItsStep):
    equal = True


def test_a_parameter_that_comes_within_a_training_step_has_to_be_alike(ranks: RankPool) -> None:
    """Its values are used before anybody can give all ranks rank 0's."""
    with pytest.raises(RankFailure, match="'scale' came after set-up, was used in a training step at once, and has"):
        ranks(2).run(lambda: fit(GrowsInItsStep, {}, []))
    one, other = ranks(2).run(lambda: fit(GrowsAlikeInItsStep, {}, []).scale.detach())
    assert torch.equal(one, other)
    assert not torch.equal(one, torch.full_like(one, 1.1))


class GrowsInConfigureOptimizers(Grows):
    def configure_optimizers(self) -> Any:
        self.scale = nn.Parameter(self.drawn())
        self.register_buffer("shift", self.drawn())
        return super().configure_optimizers()


def test_a_parameter_made_with_the_optimizers_starts_from_rank_zeros(ranks: RankPool) -> None:
    """Modules were compared and broadcast before `configure_optimizers`, and nobody looked again."""

    def values() -> tuple[Any, Any]:
        module = fit(GrowsInConfigureOptimizers, {}, [])
        return module.scale.tolist(), module.shift.tolist()

    one, other = ranks(2).run(values)
    assert one == other


class Normalizes(Grows):
    def grow(self, how: str) -> None:
        self.more = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5)).double()
        self.trainer.strategy.optimizers[0].add_param_group({"params": self.more.parameters()})


def test_a_batch_norm_that_comes_late_is_synchronized(ranks: RankPool) -> None:
    def report() -> str:
        flags = {"sync_batchnorm": True, "callbacks": [Grow("", "on_train_start", 0)]}
        found = str(check_equivalence(Normalizes, rows(23), devices=2, **flags))
        return found if "gradient '" in found else ""

    assert ranks(2).run(report, group=False) == ["", ""]


def test_buffers_that_come_before_an_empty_share_are_those_of_the_others(ranks: RankPool) -> None:
    """The rank without samples takes part in what came after the step before; it had kept its own buffers."""

    def report() -> str:
        flags = {"sync_batchnorm": True, "callbacks": [Grow("", "on_train_batch_end", 4)], "batch_size": 2}
        return str(check_equivalence(Normalizes, rows(14), devices=3, steps=9, **flags))

    for found in ranks(3).run(report, group=False):
        assert "gradient '" not in found
        assert "buffer '" not in found


class CountsLate(Grows):
    """Gets its first buffer in the third step, and adds this rank's number to it in each forward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if hasattr(self, "shift"):
            self.shift += self.global_rank
        return loss


def test_a_module_without_buffers_may_get_one(ranks: RankPool) -> None:
    """Where there had been none, buffers were never aligned."""

    def shift() -> Any:
        return fit(CountsLate, {}, [Grow("buffer", "on_train_batch_start", 2)]).shift.tolist()

    zero, one = ranks(2).run(shift)
    assert zero == one
    torch.manual_seed(0)
    assert torch.tensor(zero).allclose(1 + 0.1 * torch.randn(5, dtype=torch.float64).float(), atol=1e-6)


def local(**options: Any) -> dict[str, Any]:
    state = PostLocalSGDState(start=1, local_allreduce=False)
    return {"ddp_comm_state": state, "ddp_comm_hook": post_local_sgd, "model_averaging_period": 2, **options}


@pytest.mark.parametrize("outer", [None, {}])
def test_local_steps_average_what_came_late(ranks: RankPool, outer: dict[str, Any] | None) -> None:
    def values() -> Any:
        module = fit(Grows, local(outer_optimizer=outer), [Grow("module", "on_train_batch_start", 2)], max_steps=7)
        return [parameter.detach().clone() for parameter in module.parameters()]

    for one, other in zip(*ranks(2).run(values), strict=True):
        assert torch.equal(one, other)


class HasPlain(Grows):
    def configure_optimizers(self) -> Any:
        self.plain = [self.drawn().requires_grad_()]
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters(), *self.plain], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_parameter_that_only_the_optimizer_has_goes_on_after_a_resume(
    ranks: RankPool, tmp_path: Any, options: dict[str, Any], accumulate: int
) -> None:
    """No state dict of a module holds it: it began anew, on one process, too."""
    path = str(tmp_path / "plain.ckpt")

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.fit_loop.progress.total_batches == 5:
                trainer.save_checkpoint(path)

    def values(callbacks: list[Any], ckpt_path: str | None) -> Any:
        flags = {"max_steps": 7, "max_epochs": -1, "accumulate_grad_batches": accumulate, "precision": "64-true"}
        world = torch.distributed.get_world_size()
        trainer = quiet(strategy=DDPStrategy(**options), devices=world, callbacks=callbacks, **flags)
        trainer.seed = 1
        torch.manual_seed(7)
        module = HasPlain()
        trainer.fit(module, rows(48)(2), ckpt_path=ckpt_path)
        return [p.detach().clone() for p in [*module.parameters(), *module.plain]]

    for whole, rest in ranks(2).run(lambda: (values([Saves()], None), values([], path))):
        assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=True))
