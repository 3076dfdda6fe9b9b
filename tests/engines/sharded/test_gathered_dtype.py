"""Under autocast FSDP gathers what autocast casts in its dtype: the bits of one process, with half of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.engines.sharded.gathered_parameter import is_cast
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import FSDPStrategy
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

WIDTH = 8


class OwnWeight(nn.Module):
    """Parameters that a user's forward multiplies and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3), nn.Parameter(torch.full((WIDTH,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.gain


class Tied(nn.Module):
    """A weight of a linear layer and of an embedding, which autocast does not cast."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) @ self.table(torch.arange(5, device=x.device)) / 20


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)
        self.out = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.into(x.transpose(1, 2)))).transpose(1, 2)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Unused(nn.Linear):
    """Beside it is a linear layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "weights of one's own": OwnWeight,
    "tied": Tied,
    "convolutions": Convolutions,
    "attention": lambda: Attention(WIDTH, 2, batch_first=True),
    "attention, biases of keys": lambda: Attention(WIDTH, 2, batch_first=True, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(5)),
    "PReLU": nn.PReLU,
    "GRU": Recurrent,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "unused": Unused,
}


class Stack(LightningModule):
    """Two blocks of a norm and the layer that is tried."""

    def __init__(self, layer: Callable[[], nn.Module], repeats: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), layer()) for _ in range(2))
        self.head, self.repeats = nn.Linear(WIDTH, 1), repeats

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            for _ in range(self.repeats):
                batch = batch + block(batch)
        return self.head(batch).float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02, momentum=0.9)


def trained(
    make: Callable[[], LightningModule], strategy: Any, precision: str = "bf16-mixed", world: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Weights after three steps, whole, and the loss of a validation."""
    torch.manual_seed(0)
    data = DataLoader(torch.randn(12, 5, WIDTH, generator=torch.Generator().manual_seed(1)), 4 // world)  # type: ignore[arg-type]
    trainer = quiet(strategy=strategy, devices=world, precision=precision, max_epochs=1)
    trainer.seed = 5
    trainer.fit(make(), data, data)
    weights = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return weights, float(trainer.callback_metrics["loss"])


def both(layer: str, precision: str) -> list[tuple[dict[str, Tensor], float]]:
    strategies: list[Any] = ["auto", FSDPStrategy(auto_wrap_policy={nn.Sequential})]
    return [trained(partial(Stack, LAYERS[layer]), strategy, precision) for strategy in strategies]


@pytest.mark.everyday(7)
@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_rank_alone_has_the_bits_of_one_process(ranks: RankPool, layer: str, precision: str) -> None:
    """Whatever a layer does with its parameters; nn.GRU was refused under FSDP, as if its weights came too late."""
    (((expected, loss), (found, same)),) = ranks(1).run(both, layer, precision, group=False)
    assert loss == same
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_autocast_leaves_alone_is_not_cast() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2)
    owners = [(part, name) for part in layer.modules() for name, _ in part.named_parameters(recurse=False)]
    kept = [type(part).__name__ for part, name in owners if not is_cast(part, name)]
    assert kept == ["LayerNorm"] * 4

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias.exp()

    assert not is_cast(Doubled(2, 2), "bias")
    assert not is_cast(nn.MultiheadAttention(2, 1, add_bias_kv=True), "bias_k")


def sent(**given: Any) -> tuple[dict[str, Tensor], dict[str, set[torch.dtype]], int]:
    """Weights, the dtypes that travelled, and the bytes of a gather of the blocks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    dtypes: dict[str, set[torch.dtype]] = {"gathers": set(), "reductions": set()}
    sizes = []
    gather, reduce = collectives.DefaultAllGather.__call__, collectives.DefaultReduceScatter.__call__

    def gathers(self: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes["gathers"].add(output_tensor.dtype)
        sizes.append(output_tensor.nbytes)
        return gather(self, output_tensor, *args, **kwargs)

    def reduces(self: Any, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes["reductions"].add(output_tensor.dtype)
        return reduce(self, output_tensor, *args, **kwargs)

    with (
        patch.object(collectives.DefaultAllGather, "__call__", gathers),
        patch.object(collectives.DefaultReduceScatter, "__call__", reduces),
    ):
        strategy = FSDPStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}, **given)
        weights, _ = trained(partial(Stack, LAYERS["encoder"]), strategy, world=dist.get_world_size())
    return weights, dtypes, max(sizes)


def test_half_of_the_bytes_travel_and_the_numbers_are_the_same(ranks: RankPool) -> None:
    """Gradients come back in float32: autocast's own cast of them is the last thing that a backward does."""
    low = ranks(2).run(sent)
    whole = ranks(2).run(partial(sent, mixed_precision=MixedPrecisionPolicy()))
    linear, norms = (
        sum(
            p.numel() for part in LAYERS["encoder"]().modules() for p in part.parameters(False) if kind == is_norm(part)
        )
        for kind in (False, True)
    )
    for (found, dtypes, size), (expected, _, most) in zip(low, whole, strict=True):
        assert dtypes["reductions"] == {torch.float32}
        assert torch.bfloat16 not in dtypes["gathers"]  # bytes: norms travel in float32 with the others
        assert size == 2 * linear + 4 * norms
        assert most == 4 * (linear + norms)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def is_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.LayerNorm)


def accumulated(shards: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    data: Any = torch.randn(24, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    strategy = FSDPStrategy(auto_wrap_policy={nn.Sequential}, accumulate_shards=shards)
    trainer = quiet(strategy=strategy, devices=2, precision="bf16-mixed", max_epochs=1, accumulate_grad_batches=3)
    trainer.seed = 5
    trainer.fit(Stack(LAYERS["encoder"]), DataLoader(data, 2))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


def test_whole_gradients_that_wait_add_up_in_float32(ranks: RankPool) -> None:
    for once, each in zip(ranks(2).run(accumulated, False), ranks(2).run(accumulated, True), strict=True):
        torch.testing.assert_close(once, each, rtol=1e-5, atol=1e-6)


class LeavesAutocast(Stack):
    """Its head computes in float32, as one that is sensitive to rounding does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return self.head(batch.float()).square().mean()


def leaves_autocast(policy: Any) -> str:
    try:
        trained(partial(LeavesAutocast, LAYERS["linear"]), FSDPStrategy(mixed_precision=policy))
    except MisconfigurationException as error:
        return str(error)
    return ""


def test_a_layer_outside_of_autocast_is_an_error_with_a_way_out(ranks: RankPool) -> None:
    (said,) = ranks(1).run(leaves_autocast, None, group=False)
    assert "precision='bf16-mixed'" in said
    assert "FSDPStrategy(mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy())" in said
    assert ranks(1).run(leaves_autocast, MixedPrecisionPolicy(), group=False) == [""]
