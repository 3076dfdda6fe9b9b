"""The mean that is shown of weights that differ between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.comm_hooks import DivergedWeights
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.tensor([1.0, 3.0]) * rank)
        self.frozen = nn.Parameter(torch.tensor([0.1, 0.7]), requires_grad=False)
        self.register_buffer("seen", torch.tensor(rank))


def look() -> list[Tensor]:
    rank = dist.get_rank()
    net = Net(rank)
    apart = DivergedWeights(net, [], None, share_buffers=True)
    apart.step()
    apart.show_mean()
    shown = [tensor.detach().clone() for tensor in (net.trained, net.frozen, net.seen)]
    apart.show_mean()  # once more changes nothing
    apart.show_own()
    assert torch.equal(net.trained, torch.tensor([1.0, 3.0]) * rank)
    assert net.seen == rank
    return shown


def test_the_mean_is_of_what_was_trained_with_rank_0s_buffers(ranks: RankPool) -> None:
    """A frozen parameter is alike on all ranks; the mean of three equal numbers may round."""
    for trained, frozen, seen in ranks(3).run(look):
        assert torch.equal(trained, torch.tensor([1.0, 3.0]))
        assert torch.equal(frozen, torch.tensor([0.1, 0.7]))
        assert seen == 0
