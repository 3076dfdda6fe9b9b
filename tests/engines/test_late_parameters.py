"""What comes after set-up: unfrozen parameters are reduced, others are refused by name; one process goes on."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from lockstep.testing import check_equivalence
from tests.loop.pieces import quiet
from tests.tools.hooked import hooked
from tests.tools.pool import RankFailure, RankPool

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
    **hooked("communication hook", "local steps to come"),
}


class Grows(LightningModule):
    """Gets parameters and buffers while it trains."""

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
        if hasattr(self, "teacher"):
            hidden = hidden + self.teacher(x).tanh()
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


def _norm(net: Any, optimizer: Any) -> None:
    net.more = nn.BatchNorm1d(5, affine=False, track_running_stats=False)


def _teacher(net: Any, optimizer: Any) -> None:
    net.teacher = copy.deepcopy(net.body).requires_grad_(False)


def _pruned(net: Any, optimizer: Any) -> None:
    prune.l1_unstructured(net.body, "weight", 0.5)


EVERY = (_attribute, _appended, _module, _inserted, _head, _weight_norm, _assigned, _thawed, _plain, _buffer, _norm)
GROWTHS: dict[str, Callable[[Any, Any], None]] = {each.__name__[1:]: each for each in (*EVERY, _teacher, _pruned)}
GO_ON = ("thawed", "teacher", "pruned")
"""What trains as on one process; all else is refused on several ranks."""
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end"),
)

OF_SAMPLES = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")


class Grow(Callback):
    """Lets the module grow, once, in a hook, after so many steps."""

    def __init__(self, how: str, hook: str, after: int) -> None:
        self.how, self.hook, self.after = how, hook, after
        setattr(self, hook, self._grow)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.done = False

    def _grow(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        enough = trainer.global_step >= self.after + (self.hook == "on_train_batch_end")
        if enough and not self.done:
            self.done = True
            pl_module.grow(self.how)


for _name in HOOKS:  # so that they count as overridden
    setattr(Grow, _name, lambda *args: None)


def rows(length: int) -> Callable[[int], Any]:
    x = torch.randn(length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return lambda batch_size: DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size, shuffle=True)


Case = tuple[str, str, str, int, int, int, int]


def strays(case: Case, world: int) -> tuple[bool, str]:
    """Whether the module grew, and what differs from one process in the gradients."""
    engine, how, hook, after, accumulate, batch_size, length = case
    strategy, growth = DDPStrategy(**ENGINES[engine]), Grow(how, hook, after)
    flags = {"accumulate": accumulate, "batch_size": batch_size, "steps": 6, "callbacks": [growth]}
    report = str(check_equivalence(Grows, rows(length), strategy=strategy, devices=world, **flags))
    return growth.done, report if "gradient '" in report or "another course" in report else ""


def cases(count: int, seed: int) -> list[tuple[Case, int]]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        how, hook = GO_ON[number % len(GO_ON)], chance.choice(HOOKS)
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


def test_what_may_come_trains_as_in_one_process(ranks: RankPool) -> None:
    look(ranks, 12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_what_may_come_trains_as_in_one_process_in_many_cases(ranks: RankPool, seed: int) -> None:
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


NAMED = {
    "attribute": "parameter 'scale'",
    "appended": "parameter 'scale'",
    "module": "parameter 'more.weight'",
    "inserted": "parameter 'more.0.weight'",
    "head": "parameter 'head.weight'",
    "weight_norm": "parameter 'body.parametrizations.weight.original0'",
    "assigned": "parameter 'body.weight'",
    "plain": "parameter \"optimizers[0].param_groups[1]['params'][0]\"",
    "buffer": "buffer 'shift'",
    "norm": "normalization layer 'more'",
}


def refusals(options: dict[str, Any]) -> list[tuple[str, str]]:
    """What was said, case by case."""
    found = []
    for number, how in enumerate(NAMED):
        hook = HOOKS[number % len(HOOKS)]
        growth = Grow(how, hook, int(number % 3 > 0 and hook not in ("on_fit_start", "on_train_start")))
        with pytest.raises(MisconfigurationException) as raised:
            fit(Grows, options, [growth], max_steps=13)
        found.append((how, str(raised.value)))
    return found


OPTIONS: list[dict[str, Any]] = [{}, {"shared_memory": False}, {"shard_optimizer": True}]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_comes_after_set_up_is_refused_by_name(ranks: RankPool, options: dict[str, Any]) -> None:
    """Each rank trained a parameter of its own, and nobody was told."""
    for rank, found in enumerate(ranks(2).run(refusals, options)):
        for how, said in found:
            assert said.startswith(f"rank {rank}: {NAMED[how]} was added after set-up"), how
        assert "in `__init__`, `configure_model` or `configure_optimizers`" in said


def test_in_one_process_it_goes_on() -> None:
    for how in GROWTHS:
        trainer = quiet(
            max_steps=4, max_epochs=-1, precision="64-true", callbacks=[Grow(how, "on_train_batch_start", 1)]
        )
        trainer.fit(Grows(), rows(24)(2))
        assert trainer.global_step == 4


class FreezesInItsWindow(Grows):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.current_epoch:
            self.body.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], 0.1, 0.9, weight_decay=0.1)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("engine", [name for name in ENGINES if not name.startswith("local")])
def test_what_is_frozen_within_a_window_is_stepped_once(ranks: RankPool, engine: str) -> None:
    """A static graph took the gradient that the window held for one that each later backward gives."""

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
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class GrowsInItsStep(Grows):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 1 and not hasattr(self, "scale"):
            self.grow("attribute")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        assert not hasattr(self, "scale")


def test_a_parameter_that_comes_within_a_training_step_is_refused_before_the_backward(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="parameter 'scale' was added after set-up"):
        ranks(2).run(lambda: fit(GrowsInItsStep, {}, []))


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


class HasPlain(Grows):
    def configure_optimizers(self) -> Any:
        self.plain = [self.drawn().requires_grad_()]
        return torch.optim.SGD([*self.body.parameters(), *self.head.parameters(), *self.plain], lr=0.1, momentum=0.9)


@pytest.mark.everyday
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
