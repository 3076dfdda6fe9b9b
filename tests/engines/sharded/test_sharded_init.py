"""Layers that are built in slices have the values, and leave the random states, of layers built at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.sharded.sharded_init import ShardedInit, rank_0_draws
from tests.tools.pool import RankFailure, RankPool


def layers() -> nn.Module:
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 70, 3),
            "norm": nn.BatchNorm1d(2000),
            "words": nn.Embedding(300, 40, padding_idx=2),
            "lstm": nn.LSTM(40, 50, 2),
            "block": nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True), 3),
        }
    )


def initialized() -> nn.Module:
    """Initializers that draw again until all numbers fit, need other tensors, or change values that are there."""
    net = nn.Sequential(*[nn.Linear(60, 60) for _ in range(4)])
    for layer in net:
        assert isinstance(layer, nn.Linear)
        nn.init.trunc_normal_(layer.weight, std=2.0)
    nn.init.orthogonal_(net[0].weight)  # type: ignore[arg-type]
    nn.init.sparse_(net[1].weight, 0.3)  # type: ignore[arg-type]
    with torch.no_grad():
        net[2].weight[3:7] = 5.0  # type: ignore[index,operator]
        net[2].weight.mul_(net[1].weight.std())  # type: ignore[union-attr,operator]
    net[3].weight = net[2].weight
    net.register_buffer("mask", torch.triu(torch.ones(70, 70)))
    net.register_parameter("shift", nn.Parameter(torch.tensor(net[1].weight.detach().numpy().tolist())))  # type: ignore[union-attr,operator]
    return net


def twice() -> nn.Module:
    """As libraries of language models do: all weights are drawn again at the end."""
    net = layers()

    def draw(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            layer.weight.data.normal_(0, 0.02)

    return net.apply(draw)


def built(make: Callable[[], nn.Module], budget: int) -> tuple[dict[str, Tensor], Tensor, int, int]:
    torch.manual_seed(3 + dist.get_rank())
    with rank_0_draws([torch.device("cpu")]), ShardedInit(budget) as building:
        net = make()
        after = torch.get_rng_state()
    state = net.state_dict(keep_vars=True)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in state.values())
    building.gather(state.values())
    return {name: tensor.detach().clone() for name, tensor in state.items()}, after, building.peak, kept


@pytest.mark.everyday
@pytest.mark.parametrize("make", [layers, initialized, twice])
@pytest.mark.parametrize(("world", "budget"), [(1, 0), (2, 0), (3, 50_000), (2, 10**9)])
def test_values_and_random_states_are_those_of_one_process(
    ranks: RankPool, make: Callable[[], nn.Module], world: int, budget: int
) -> None:
    torch.manual_seed(3)
    expected, state = make().state_dict(), torch.get_rng_state()
    for found, after, peak, kept in ranks(world).run(built, make, budget):
        assert list(found) == list(expected)
        torch.testing.assert_close(expected, found, rtol=0, atol=0)
        assert torch.equal(after, state)
        if budget < 10**6:
            assert kept < 2 * budget + 30_000
            assert peak < budget + 120_000


def by_rank() -> None:
    def make() -> nn.Module:
        net = nn.Linear(100, 100)
        with torch.no_grad():
            net.weight.add_(dist.get_rank())
        nn.Linear(100, 100)
        return net

    built(make, 0)


def test_values_that_depend_on_the_rank_are_refused(ranks: RankPool) -> None:
    """Each rank would keep a slice of other values."""
    with pytest.raises(RankFailure, match="creates different values on this rank"):
        ranks(2).run(by_rank)
