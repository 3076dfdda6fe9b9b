"""Blocks that move between the ranks of a pipeline while a fit runs: by measured speed, at random, over a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.extensions.balancing.pipeline.control import Resplit
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import is_placeholder
from lockstep.strategies import BalancedStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import Plain, rows
from tests.extensions.balancing.balanced import Clock, check_reports, draw_split, made_up_clock
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


class Scaled(nn.Module):
    """A block with a buffer that its forward reads, and a state of its own that is in no tensor."""

    factor: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(width, width), 0.0
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor + x

    def get_extra_state(self) -> float:
        return self.extra

    def set_extra_state(self, state: float) -> None:
        self.extra = state


class Tied(LightningModule):
    """Seven blocks, of which the first and the last share a matrix, under Adam in two groups; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(6, 5)
        self.layers = nn.ModuleList([Scaled(5) for _ in range(7)])
        self.layers[-1].linear.weight = self.layers[0].linear.weight
        self.layers[3].linear.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.table(batch[0]) * self.scale
        for layer in self.layers:
            x = layer(x)
        loss = (x.square().sum(1) * self.scale - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        first, *others = (p for p in self.parameters() if p.requires_grad)
        return torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": others}], lr=2e-3, eps=1e-3)


class Jumps(Callback):
    """Moves blocks to other ranks or devices before each window, at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.splits: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and isinstance(trainer.strategy, BalancedStrategy):
            blocks = len(pl_module.layers if hasattr(pl_module, "layers") else pl_module.net)
            self.splits.append(draw_split(self.draw, blocks, len(trainer.strategy.split)))
            trainer.strategy.resplit(self.splits[-1])


# -- the numbers of one process ------------------------------------------------------------------------------


def jumping(
    make: type[LightningModule], stages: int, seed: int, given: dict[str, Any], schedule: str = "1f1b"
) -> EquivalenceReport:
    strategy = BalancedStrategy(stages, split="equal", schedule=schedule)
    world = dist.get_world_size()
    jumps = Jumps(seed)
    return check_equivalence(make, rows(37), strategy=strategy, devices=world, steps=8, callbacks=[jumps], **given)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize(("world", "stages"), [(2, 2), (3, 3), (4, 2)])
def test_blocks_that_move_at_random_train_as_one_process(ranks: RankPool, world: int, stages: int, seed: int) -> None:
    make, given = ((Plain, {}), (Tied, {"accumulate": 2, "gradient_clip_val": 0.5}))[(seed + world) % 2]
    check_reports(ranks(world).run(jumping, make, stages, seed, given, timeout=60))


def test_blocks_move_between_ranks_that_have_two_stages_each(ranks: RankPool) -> None:
    check_reports(ranks(2).run(jumping, Tied, 2, 3, {"accumulate": 2}, "interleaved", timeout=60))


class Keeps(Callback):
    """The whole state of the run after each step, as a checkpoint has it."""

    def __init__(self) -> None:
        self.states: list[tuple[Any, Any]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        state = trainer.strategy.save()
        self.states.append(deepcopy((state.module, state.optimizers[0])))


def states_of(strategy: Any, devices: int, seed: int | None) -> list[tuple[Any, Any]]:
    torch.manual_seed(4)
    keeps, module = Keeps(), Tied()
    callbacks = [keeps] if seed is None else [Jumps(seed), keeps]
    trainer = quiet(strategy=strategy, devices=devices, max_epochs=1, precision="64-true", callbacks=callbacks)
    trainer.fit(module, rows(24, shuffle=False)(4))
    return keeps.states


def test_adams_states_move_with_their_blocks(ranks: RankPool) -> None:
    stays, *_ = ranks(3).run(states_of, BalancedStrategy(split=[3, 2, 2]), 3, None, timeout=60)
    moves, *_ = ranks(3).run(states_of, BalancedStrategy(split="equal"), 3, 1, timeout=60)
    alone = states_of("auto", 1, None)
    assert len(stays) == len(moves) == len(alone) == 6
    for number, (still, moved, one) in enumerate(zip(stays, moves, alone, strict=True)):
        assert len(moved[1]["state"]) == len(one[1]["state"]) > 10
        assert all(int(state["step"]) == number + 1 for state in moved[1]["state"].values())
        torch.testing.assert_close(moved, still, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(moved, one, rtol=1e-10, atol=1e-12)


def carried() -> tuple[list[float], list[float], list[bool]]:
    """What a block has after it has moved to this rank, and whether others' blocks are let go of."""

    class Moves(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            place = trainer.global_rank
            if batch_idx == 0:
                for layer in pl_module.layers:
                    layer.factor.fill_(2.0 + place)
                    layer.extra = 2.0 + place
                if place == 1:  # made by a forward, on the rank that ran it
                    pl_module.layers[2].register_buffer("late", torch.tensor(7.0), persistent=False)
                trainer.strategy.resplit([1, 6])
                self.factors = [layer.factor.item() for layer in pl_module.layers]
                self.extras = [layer.extra for layer in pl_module.layers]
                self.late = pl_module.layers[2].late.item()
                self.away = [is_placeholder(layer.linear.bias) for layer in pl_module.layers]

    moves = Moves()
    quiet(strategy=BalancedStrategy(split=[4, 3]), devices=2, max_epochs=1, precision="64-true", callbacks=[moves]).fit(
        Tied(), rows(4)(4)
    )
    assert moves.late == 7.0
    return moves.factors, moves.extras, moves.away


def test_buffers_and_extra_states_move_with_their_blocks(ranks: RankPool) -> None:
    last, first = ranks(2).run(carried, timeout=60)  # the last stage is on the first rank
    assert last[0] == last[1] == [2.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0]
    assert first[0] == first[1] == [3.0] * 7
    assert last[2] == [True] + [False] * 6
    assert first[2] == [False] + [True] * 6


# -- by measured seconds -------------------------------------------------------------------------------------


CLOCK = Clock()
FACTOR: Callable[[int, int], float] = lambda rank, step: 1.0  # noqa: E731  (set for a fit)


class Costly(nn.Module):
    """A block that takes a made-up time on its rank: a third forward, the rest backward."""

    module: list[LightningModule]

    def __init__(self, units: float) -> None:
        super().__init__()
        self.units, self.linear = units, nn.Linear(6, 6)
        self.module = []

    def takes(self, units: float) -> None:
        module = self.module[0]
        CLOCK.now += units * FACTOR(module.global_rank, module.global_step) / 3000

    def forward(self, x: Tensor) -> Tensor:
        out = x + torch.tanh(self.linear(x))
        self.takes(self.units)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.takes(2 * self.units))
        return out


class Uneven(LightningModule):
    """Blocks of which some cost more, and a head."""

    def __init__(self, units: tuple[float, ...], head: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Costly(each) for each in units))
        for block in self.net:
            block.module = [self]
        self.head = head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.net[0].takes(self.head)
        if self.head:
            out = out * 1.0
            out.register_hook(lambda gradient: self.net[0].takes(2 * self.head))
        loss = (out.squeeze() - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def followed(
    units: tuple[float, ...],
    head: float,
    slow: tuple[int, float, int],
    stages: int,
    given: dict[str, Any],
    schedule: str = "1f1b",
) -> tuple[EquivalenceReport, list[Resplit]]:
    """A fit in which one rank is slow until a step, and then the next one."""
    global FACTOR, CLOCK
    rank, factor, until = slow
    FACTOR = lambda mine, step: factor if mine == rank + (step >= until) else 1.0  # noqa: E731
    strategy = BalancedStrategy(stages, schedule=schedule)
    world = dist.get_world_size()
    with made_up_clock() as CLOCK:
        settings = {"devices": world, "batch_size": 4, "steps": 32, **given}
        report = check_equivalence(lambda: Uneven(units, head), rows(203), strategy=strategy, **settings)
    return report, strategy.decisions


@pytest.mark.parametrize(
    ("schedule", "splits", "milliseconds"),
    [
        ("1f1b", [(4, 4), (6, 2), (2, 6)], 6),
        ("interleaved", [(2, 2, 2, 2), (3, 1, 3, 1), (1, 3, 1, 3)], 3),  # rank 0 has the second stage and the last
    ],
)
def test_a_slow_rank_gets_fewer_blocks_and_the_numbers_stay(
    ranks: RankPool, schedule: str, splits: list[tuple[int, ...]], milliseconds: int
) -> None:
    for report, decisions in ranks(2).run(followed, (1.0,) * 8, 0.0, (0, 3.0, 12), 2, {}, schedule, timeout=60):
        assert report, report
        first, second = decisions
        assert [first.before, first.after, second.after] == splits
        assert (first.step, second.before) == (0, first.after)
        assert first.predicted == pytest.approx((milliseconds / 1000,) * len(splits[0]))
        assert 12 < second.step <= 30
        assert second.gain == pytest.approx(3.0)
        words = f"stage 0 takes {3 * milliseconds} ms of a micro-batch, 3.00 x what was predicted"
        assert words in second.reason


def test_what_runs_behind_the_chain_counts_for_the_last_stage(ranks: RankPool) -> None:
    units, slow = (4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (9, 1.0, 99)
    for report, decisions in ranks(2).run(followed, units, 2.0, slow, 2, {}, timeout=60):
        assert report, report
        assert [found.after for found in decisions] == [(2, 5), (3, 4)]
        assert decisions[1].seconds == pytest.approx((0.005, 0.007))
        assert decisions[1].predicted == pytest.approx((0.006, 0.006))


def test_replicas_take_one_split_by_their_slowest_ranks(ranks: RankPool) -> None:
    slow = (2, 3.0, 99)  # the last stage of the second replica
    for report, decisions in ranks(4).run(followed, (1.0,) * 8, 0.0, slow, 2, {"steps": 10}, timeout=60):
        assert report, report
        assert [found.after for found in decisions] == [(6, 2)]


# -- checkpoints ---------------------------------------------------------------------------------------------


class Killed(Exception):
    """In the place of a SIGKILL."""


class Dies(Callback):
    """Ends the fit at a step; before it blocks move."""

    def __init__(self, step: int, split: list[int]) -> None:
        self.step, self.split = step, split

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.strategy.resplit(self.split)
        if trainer.global_step == self.step:
            raise Killed


class Reads(Tied):
    """Notes the samples that count, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += [(self.trainer.global_step, sample) for sample in batch[2].tolist()]


def numbered(batch_size: int) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(7)
    x, count = torch.randn(29, 6, generator=source), torch.ones(29)
    return DataLoader(TensorDataset(x, count, torch.arange(29)), batch_size, shuffle=True)


def live(folder: Path, strategy: Any, devices: int, batch_size: int, dies: tuple[int, list[int]] | None) -> Any:
    """A life of a run: (samples by step, weights, strategy at the end); it may end early."""
    torch.manual_seed(5)
    module = Reads()
    callbacks: list[Callback] = [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)]
    trainer = quiet(
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        precision="64-true",
        enable_checkpointing=True,
        callbacks=[*callbacks, *([] if dies is None else [Dies(*dies)])],
        order="lockstep",
    )
    trainer.seed = 5
    latest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    try:
        trainer.fit(module, numbered(batch_size), ckpt_path=latest)
    except Killed:
        return module.seen, None, None
    weights = {name: value.detach().clone() for name, value in module.state_dict().items() if torch.is_tensor(value)}
    known = trainer.strategy
    told = (known.split, known.decisions) if isinstance(known, BalancedStrategy) else None
    return module.seen, weights, told


@pytest.mark.everyday(2)
@pytest.mark.parametrize(("world", "strategy"), [(2, BalancedStrategy()), (3, BalancedStrategy()), (1, "auto")])
def test_a_run_that_was_killed_goes_on_with_other_stages(
    ranks: RankPool, tmp_path: Path, world: int, strategy: Any
) -> None:
    whole, weights, _ = live(tmp_path / "whole", "auto", 1, 6, None)
    folder = tmp_path / "killed"
    first = ranks(2).run(live, folder, BalancedStrategy(split="equal"), 2, 6, (5, [1, 6]), timeout=60)
    saved = torch.load(next(folder.glob("*step=4.ckpt")), weights_only=True)
    assert saved["lockstep"]["strategy"] == {"split": [1, 6]}
    if world > 1:
        seen, found, (_, decisions) = ranks(world).run(live, folder, strategy, world, 6, None, timeout=60)[0]
        assert decisions[0].before == {2: (1, 6), 3: (3, 2, 2)}[world]  # that of the checkpoint, where it can be
    else:
        seen, found, _ = live(folder, strategy, 1, 6, None)
    torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-12)
    assert [each for each in first[0][0] if each[0] < 4] + seen == whole


def test_a_split_that_was_asked_for_counts_more_than_the_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(live, tmp_path, BalancedStrategy(split="equal"), 2, 6, (5, [2, 5]), timeout=60)
    strategies = BalancedStrategy(split="equal"), BalancedStrategy(split=[6, 1])
    for strategy, split in zip(strategies, ((4, 3), (6, 1)), strict=True):
        assert ranks(2).run(live, tmp_path, strategy, 2, 6, None, timeout=60)[0][2] == (split, [])


# -- what cannot be ------------------------------------------------------------------------------------------


def test_blocks_move_in_a_fit_alone() -> None:
    with pytest.raises(MisconfigurationException, match="blocks can only move while a fit runs"):
        BalancedStrategy().resplit([1, 2])
