"""Where two ranks have the bits of one process that accumulates, and where they have its numbers to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


class Shared(LightningModule):
    """A layer that is used twice: as it is, or inside of two checkpoints."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.twice, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def part(self, x: Tensor) -> Tensor:
        return self.twice(x).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.first(x).tanh()
        for _ in range(2):
            if self.reentrant is None:
                hidden = self.part(hidden)
            else:
                hidden = checkpoint(self.part, hidden, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(self.last(hidden), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def parameters(world: int, reentrant: bool | None, options: dict[str, Any], flags: dict[str, Any]) -> list[Tensor]:
    """After two epochs of windows of two micro-batches, whichever ranks play them."""
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 3)
    ranks = {"strategy": DDPStrategy(**options), "devices": 2} if world == 2 else {"accumulate_grad_batches": 2}
    torch.manual_seed(5)
    module = Shared(reentrant)
    quiet(max_epochs=2, **ranks, **flags).fit(module, data)
    return [parameter.detach().clone() for parameter in module.parameters()]


CLIP = {"gradient_clip_val": 0.5}
BITWISE: dict[str, tuple[bool | None, dict[str, Any], dict[str, Any]]] = {
    "plain": (None, {}, {}),
    "norm clipping": (None, {}, CLIP),
    "over TCP": (None, {"shared_memory": False}, CLIP),
    "checkpoints": (False, {}, {}),
    "static graph": (None, {"static_graph": True}, CLIP),
    "sharded optimizer": (None, {"shard_optimizer": True}, {}),
    "sharded optimizer, clipping by value": (
        None,
        {"shard_optimizer": True},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
}
ROUNDED: dict[str, tuple[bool | None, dict[str, Any], dict[str, Any]]] = {
    # each checkpoint adds its gradient to `.grad` by itself, so that one process sums up in another order
    "re-entrant checkpoints": (True, {}, {}),
    # each rank has a norm of its slices: the sum of their squares is rounded elsewhere
    "sharded optimizer, norm clipping": (None, {"shard_optimizer": True}, CLIP),
}


@pytest.mark.everyday(5)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", [*BITWISE, *ROUNDED])
def test_two_ranks_have_the_bits_of_one_process_that_accumulates(ranks: RankPool, case: str) -> None:
    """The README says where they do not."""
    setting = {**BITWISE, **ROUNDED}[case]
    expected = parameters(1, *setting)
    for found in ranks(2).run(lambda: parameters(2, *setting)):
        for one, other in zip(found, expected, strict=True):
            if case in BITWISE:
                assert torch.equal(one, other)
            else:
                assert torch.allclose(one, other, rtol=0, atol=1e-6)
