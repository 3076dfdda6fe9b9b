"""The reducer on GPU tensors: over NCCL with one rank, over gloo with two ranks that share a card."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel import hooks
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.extensions.parallel.dp.replicas import DataParallel, in_threads
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook
from tests.tools.pool import RankPool

pytestmark = pytest.mark.gpu
SMALL = 10_000 / 2**20  # MiB: several buckets


class Net(nn.Module):
    """Large and small gradients, statistics, and a layer that is not always used."""

    def __init__(self, extra: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(70, 70), nn.BatchNorm1d(70)
        self.last = nn.Linear(70, 5)
        self.extra = nn.Linear(5, 5) if extra else None

    def forward(self, x: Tensor, use: bool = False) -> Tensor:
        y = self.last(self.norm(self.first(x)).tanh())
        return self.extra(y) if use and self.extra is not None else y


def _batch(rank: int, step: int, device: str) -> Tensor:
    return torch.randn(6, 70, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in net.named_parameters()}


def _trained(device: str, views: bool) -> list[dict[str, Tensor | None]]:
    """Rank 1 uses the extra layer in the last step, and nobody before."""
    rank, net = dist.get_rank(), Net().to(device)
    model = DistributedDataParallel(net, bucket_cap_mb=SMALL, gradient_as_bucket_view=views, shared_memory=False)
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(4):
        optimizer.zero_grad()
        model(_batch(rank, step, device), rank == 1 and step == 3).square().mean().backward()
        found.append(_gradients(net))
        optimizer.step()
    return found


@pytest.mark.parametrize("views", [True, False])
def test_two_ranks_on_one_card_over_gloo(ranks: RankPool, views: bool) -> None:
    ours, theirs = ranks(2).run(_trained, "cuda", views)
    cpu, _ = ranks(2).run(_trained, "cpu", views)
    for one, other, right in zip(ours, theirs, cpu, strict=True):
        for name, grad in right.items():
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
            torch.testing.assert_close(one[name], grad, rtol=1e-4, atol=1e-5)


def _without_waiting(device: str, views: bool, hooked: bool) -> tuple[list[dict[str, Tensor | None]], ...]:
    """Steps in which whatever lets the program wait for the GPU is an error, and the same without a reducer."""
    on_card = device == "cuda"
    dist.init_process_group(
        "nccl" if on_card else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0) if on_card else None,
    )
    net, plain = Net(extra=False).to(device), Net(extra=False).to(device)
    reducer = Reducer(
        net.named_parameters(), bucket_cap_mb=SMALL, gradient_as_bucket_view=views, transport=AllReduce(None)
    )
    if hooked:
        attach_hook(reducer, None, hooks.allreduce)
    found, right = [], []
    for step in range(5):
        x = _batch(0, step, device)
        plain.zero_grad()
        plain(x).square().mean().backward()
        right.append(_gradients(plain))
        net.zero_grad()
        if on_card and step > 2:  # by now buckets are laid out, and memory is there
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = net(x).square().mean()
            reducer.prepare()
            loss.backward()
            reducer.finish()
        finally:
            if on_card:
                torch.cuda.set_sync_debug_mode("default")
        found.append(_gradients(net))
    reducer.detach()
    return found, right


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("views", [True, False])
def test_a_step_over_nccl_does_not_wait_for_the_gpu(ranks: RankPool, views: bool, hooked: bool) -> None:
    ((found, right),) = ranks(1).run(_without_waiting, "cuda", views, hooked, group=False)
    for one, other in zip(found, right, strict=True):
        for name, grad in other.items():
            torch.testing.assert_close(one[name], grad)


def test_a_part_of_a_batch_on_the_cpu_is_there_when_it_is_read() -> None:
    """It was copied as if a GPU was to read it: the CPU does not wait for what is on its way."""
    net, plain = Net(extra=False).cuda(), Net(extra=False)
    x = torch.randn(64, 70)
    y = DataParallel(net.eval(), ["cuda:0", "cpu"])(x.cuda())
    assert y.device == torch.device("cuda", 0)
    torch.testing.assert_close(y.cpu(), plain.eval()(x), rtol=1e-4, atol=1e-5)


def test_parts_run_on_the_callers_stream() -> None:
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        expected = torch.cuda.current_stream(device)
        assert in_threads([torch.cuda.current_stream] * 2, [device] * 2) == [expected] * 2
