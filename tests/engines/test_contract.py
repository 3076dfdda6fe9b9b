"""One contract for all strategies: a row for each, alone and on ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.strategies import (
    DDPStrategy,
    FSDPStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lockstep.utilities.exceptions import MisconfigurationException
from tests.engines.averaging import AveragingStrategy
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool


def deepspeed_rows() -> list[tuple[type[Strategy], int]]:
    if not is_there("deepspeed") or find_spec("deepspeed") is None:
        return []
    from lockstep.strategies import DeepSpeedStrategy

    return [(DeepSpeedStrategy, size) for size in (1, 2, 3)]


def balanced_rows() -> list[tuple[type[Strategy], int]]:
    """Rows of the pipeline, where its extension is there."""
    if not is_there("balancing"):
        return []
    from lockstep.strategies import BalancedStrategy

    return [(BalancedStrategy, size) for size in (2, 3)]


ROWS: list[tuple[type[Strategy], int]] = [
    (SingleDeviceStrategy, 1),
    (DDPStrategy, 1),
    (DDPStrategy, 2),
    (DDPStrategy, 3),
    (FSDPStrategy, 1),
    (FSDPStrategy, 2),
    (FSDPStrategy, 3),
    (AveragingStrategy, 1),
    (AveragingStrategy, 2),
    (AveragingStrategy, 3),
    *balanced_rows(),
    *deepspeed_rows(),
]


def listed(value: Any) -> Any:
    """The same with lists in the place of tensors."""
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [listed(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


class Talks(Slope):
    """Notes the collectives' answers from inside a fit, and the gradients however the engine holds them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.strategy.whole_gradients():
            super().on_before_optimizer_step(optimizer)

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        rank, size = strategy.global_rank, strategy.world_size
        mine = torch.tensor([float(rank)])
        strategy.barrier("test")
        gathered = strategy.all_gather(mine)
        self.answers = {
            "is zero": strategy.is_global_zero == (rank == 0) == self.trainer.is_global_zero,
            "gathered": gathered.flatten().tolist() == [float(number) for number in range(size)],
            "shape": gathered.shape == ((1,) if size == 1 else (size, 1)),
            "reduced": [strategy.reduce(mine, reduce_op=op).item() for op in ("mean", "sum", "min", "max")]
            == [(size - 1) / 2, size * (size - 1) / 2, 0.0, size - 1.0],
            "unchanged": mine.item() == rank,
            "broadcast": strategy.broadcast([rank], src=size - 1) == [size - 1],
            "stacked": strategy.gather_stacked(mine.double()).tolist() == [[float(n)] for n in range(size)],
            "objects": strategy.gather_objects({"rank": rank}) == [{"rank": n} for n in range(size)],
            "module": strategy.model is strategy.lightning_module is self,
            "numbers": listed(self.all_gather({"rank": rank, "it": [0.5, True]}))
            == (
                {"rank": 0, "it": [0.5, True]}
                if size == 1
                else {"rank": [*range(size)], "it": [[0.5] * size, [True] * size]}
            ),
            "all agree": strategy.reduce_boolean_decision(rank == 0) == (size == 1),
            "any agrees": strategy.reduce_boolean_decision(rank == 0, all=False),
            "none agrees": not strategy.reduce_boolean_decision(False, all=False),
        }


class Chained(Talks):
    """The same behind a chain that changes nothing."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__(lr)
        self.chain = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.chain(batch + 0.0 * self.w), batch_idx)


def fit(kind: type[Strategy], size: int) -> dict[str, bool]:
    module = (Chained if kind.__name__ == "BalancedStrategy" else Talks)(lr=1.0)
    if kind.__name__ == "DeepSpeedStrategy":  # whose weights are in float32
        module.float()
    trainer = quiet(strategy=kind(), devices=size, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, numbers(7))
    state, replicas = trainer.strategy.save(), trainer.strategy.replicas.count
    if kind.__name__ == "BalancedStrategy":  # as from a file, whose values rank 0 has
        state = trainer.strategy.broadcast(state)
    trainer.strategy.load(state)
    return {
        **module.answers,
        "gradients": module.gradients == pytest.approx(means(7, 2 * replicas)),
        "weights": module.w.item() == pytest.approx(-sum(means(7, 2 * replicas))),
        "state": trainer.strategy.save().own == state.own,
    }


def means(count: int, size: int) -> list[float]:
    windows = [range(first, min(first + size, count + 1)) for first in range(1, count + 1, size)]
    return [sum(window) / len(window) for window in windows]


@pytest.mark.everyday
@pytest.mark.parametrize(("kind", "size"), ROWS)
def test_a_strategy_keeps_the_contract(ranks: RankPool, kind: type[Strategy], size: int) -> None:
    answers = [fit(kind, size)] if kind is SingleDeviceStrategy else ranks(size).run(fit, kind, size, timeout=40)
    for answer in answers:
        assert [name for name, right in answer.items() if not right] == []


def buffers(broadcast: bool) -> list[float]:
    class Counts(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rank", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = self.rank.item()
            self.rank.fill_(self.global_rank + 1)
            return super().training_step(batch, batch_idx)

    module = Counts()
    strategy = DDPStrategy(broadcast_buffers=broadcast)
    quiet(strategy=strategy, devices=2, max_epochs=1).fit(module, numbers(4))
    return [module.seen, module.rank.item()]


def test_buffers_are_rank_zeros_unless_switched_off(ranks: RankPool) -> None:
    assert ranks(2).run(buffers, True) == [[1.0, 1.0], [1.0, 1.0]]
    assert ranks(2).run(buffers, False) == [[1.0, 1.0], [2.0, 2.0]]


class DependsOnRank(Slope):
    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            self.more = torch.nn.Parameter(torch.zeros(3))


def test_modules_that_differ_are_named_on_every_rank(ranks: RankPool) -> None:
    def said() -> str:
        with pytest.raises(MisconfigurationException) as raised:
            quiet(strategy="ddp", devices=2, max_epochs=1).fit(DependsOnRank(), numbers(2))
        return str(raised.value)

    for text in ranks(2).run(said):
        assert "rank 0 has nothing more, rank 1 has parameter 'more'" in text
