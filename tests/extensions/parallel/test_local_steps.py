"""Local steps over an uneven tail: a rank's gradient is the mean over its own samples, or its node's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import LightningModule
from lockstep.extensions.parallel.hooks.local_sgd import PostLocalSGDState, group_of, post_local_sgd
from lockstep.ground import comm
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

X = torch.randn(15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
PERIOD, LR, MOMENTUM = 3, 0.1, 0.9


class Records(LightningModule):
    """Writes down the samples of each of its micro-batches, but for borrowed ones."""

    def __init__(self, weighs: bool = False, manual: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64))
        self.weighs, self.automatic_optimization = weighs, not manual
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, places = batch
        if self.trainer.results.weight:
            self.seen.append(places.tolist())
        loss = ((x * self.w).sum(1).square() + (x * self.w).sum(1)).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return {"loss": loss, "weight": float(len(x))} if self.weighs else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = len(self.seen)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.seen) == self.before:
            self.seen.append([])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter((X[place], place) for place in range(len(X)))


def run(accumulate: int, stream: bool, start: int, members: list[list[int]] | None, **how: bool) -> Any:
    """Micro-batches of each rank, and the parameters that all have in the end."""
    group = next((group_of(ranks) for ranks in members or () if comm.rank() in ranks), None)
    state = PostLocalSGDState(start, group, local_allreduce=members is not None)
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_local_sgd, model_averaging_period=PERIOD)
    module = Records(**how)
    data: Any = Stream() if stream else TensorDataset(X, torch.arange(len(X)))
    trainer = quiet(strategy=strategy, devices=comm.world_size(), max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(data, 2))
    return comm.all_gather_object(module.seen), module.w.detach()


def by_hand(seen: list[list[list[int]]], accumulate: int, start: int, members: list[list[int]]) -> Tensor:
    """The same on one process: weights and momenta of each rank, a mean over the samples of those who step together."""
    world = len(seen)
    ws = [torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64) for _ in range(world)]
    momenta: list[Tensor | None] = [None] * world
    per_epoch = len(seen[0]) // 2
    step = 0
    for epoch in range(2):
        for first in range(0, per_epoch, accumulate):
            last = min(first + accumulate, per_epoch)
            together = [list(range(world))] if step < start else members
            gradients: dict[int, Tensor | None] = {}
            for ranks in together:
                total, count = torch.zeros(3, dtype=torch.float64), 0
                for rank in ranks:
                    for number in range(epoch * per_epoch + first, epoch * per_epoch + last):
                        places = seen[rank][number]
                        x = X[places]
                        out = (x * ws[rank]).sum(1, keepdim=True)
                        total += ((2 * out + 1) * x).sum(0)
                        count += len(places)
                for rank in ranks:
                    gradients[rank] = total / count if count else None
            for rank in range(world):
                gradient = gradients[rank]
                if gradient is not None:  # who has no samples leaves its weights alone
                    kept = momenta[rank]
                    momenta[rank] = gradient if kept is None else MOMENTUM * kept + gradient
                    ws[rank] = ws[rank] - LR * momenta[rank]
            if step >= start and (step - start) % PERIOD == 0:
                ws = [torch.stack(ws).mean(0)] * world
            step += 1
    return torch.stack(ws).mean(0)


CASES: dict[str, tuple[int, bool, int, dict[str, bool]]] = {
    "plain": (1, False, 0, {}),
    "later": (1, False, 2, {}),
    "accumulated": (2, False, 1, {}),
    "stream": (1, True, 0, {}),
    "own weights": (2, False, 1, {"weighs": True}),
    "manual": (1, False, 1, {"manual": True}),
}


@pytest.mark.everyday
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_local_gradient_is_the_mean_over_a_ranks_own_samples(ranks: RankPool, case: str, world: int) -> None:
    """It was scaled by its samples' part of all ranks' times their number: by up to that number."""
    accumulate, stream, start, how = CASES[case]
    seen, found = ranks(world).run(lambda: run(accumulate, stream, start, None, **how), timeout=40)[0]
    samples = sorted(place for of_rank in seen for places in of_rank for place in places)
    assert samples == sorted([*range(len(X))] * 2)
    alone = [[rank] for rank in range(world)]
    assert torch.allclose(found, by_hand(seen, accumulate, start, alone), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["plain", "accumulated", "own weights"])
def test_a_nodes_gradient_is_the_mean_over_its_samples(ranks: RankPool, case: str) -> None:
    accumulate, stream, start, how = CASES[case]
    nodes = [[0, 1], [2]]
    seen, found = ranks(3).run(lambda: run(accumulate, stream, start, nodes, **how), timeout=40)[0]
    assert torch.allclose(found, by_hand(seen, accumulate, start, nodes), rtol=0, atol=1e-12)
