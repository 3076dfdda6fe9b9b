"""What is on the CPU travels by gloo beside a device's own backend, and never over the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.cluster.world import World
from lockstep.engines import ranks
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.ranks import RankedStrategy
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from tests.tools.pool import RankPool

CUDA = torch.device("cuda", 0)


def _on_cuda(strategy: RankedStrategy, size: int = 2) -> RankedStrategy:
    strategy.collectives.world = World(0, size, 0, 1, 0, size, "10.0.0.1", 29500)
    strategy.root_device = CUDA
    strategy.devices = [CUDA]
    return strategy


def test_ranks_on_gpus_have_gloo_beside_nccl() -> None:
    """Over "nccl" alone each message of the host was a copy to the GPU, a collective there, and a copy back."""
    assert _on_cuda(DDPStrategy()).process_group_backend == "cpu:gloo,cuda:nccl"
    assert _on_cuda(DDPStrategy(process_group_backend="nccl")).process_group_backend == "nccl"
    many = ranks.CONNECTED
    assert _on_cuda(DDPStrategy(), many).process_group_backend == "nccl"  # each would be connected with all others
    assert _on_cuda(FSDPStrategy(cpu_offload=True), many).process_group_backend == "cpu:gloo,cuda:nccl"
    on_cpu = _on_cuda(DDPStrategy())
    on_cpu.root_device = torch.device("cpu")
    assert on_cpu.process_group_backend == "gloo"


@pytest.mark.parametrize("asked", [None, "nccl", "gloo"])
def test_the_group_is_bound_to_its_device_and_has_files_for_its_connections(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbound, NCCL connects when it is first used, and makes a communicator for each pair that sends and receives."""
    made: dict[str, Any] = {}
    files: list[int] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.update(given, backend=backend))
    monkeypatch.setattr(ranks, "provide_files", files.append)
    for name in ("connect_ranks", "connect_nodes", "choose_gloo_interface", "side"):
        monkeypatch.setattr(ranks, name, lambda *_: None)
    monkeypatch.setattr(ranks.EXIT_GROUP, "at_exit", lambda _: None)
    monkeypatch.setattr(comm, "barrier", lambda: None)
    _on_cuda(DDPStrategy(process_group_backend=asked))._make_group()
    assert made["backend"] == (asked or "cpu:gloo,cuda:nccl")
    assert made["device_id"] == (None if asked == "gloo" else CUDA)
    assert files == ([] if asked == "nccl" else [2])


# -- groups that carry a device's tensors alone, and groups that carry the host's, too


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes a group of two ranks of which one is here; what they send comes to nobody."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # so that a mesh chooses no device: none is here
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def make(backend: str) -> None:
        fakes = {"nccl": "cuda:fake", "cpu:gloo,cuda:nccl": "cpu:fake,cuda:fake"}
        dist.init_process_group(fakes[backend], rank=0, world_size=2, store=FakeStore())

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def _offloaded() -> torch.nn.Parameter:
    """A parameter of FSDP's with its shard on the CPU, and its gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size((4, 3)), (3, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cuda", (2,)), (Shard(0),), tensor_meta=meta)
    made: Any = DTensor
    parameter = torch.nn.Parameter(made(torch.ones(2, 3), spec, requires_grad=False))
    parameter.grad = made(torch.ones(2, 3), spec, requires_grad=False)
    return parameter


def test_offloaded_shards_are_clipped_and_saved(group: Callable[[str], None]) -> None:
    """They are CPU tensors on a mesh of GPUs: the first clipping, and the first checkpoint, ended the run."""
    from lockstep.engines.sharded.fully_shard import clip_norm, gathered, optimizer_state

    group(_on_cuda(FSDPStrategy(cpu_offload=True)).process_group_backend)
    parameter = _offloaded()
    clip_norm([parameter], 1.0)
    assert gathered({"w": parameter.detach()}, True)["w"].shape == (4, 3)
    adam = torch.optim.Adam([parameter])
    adam.step()
    assert optimizer_state(adam, True)["state"][0]["exp_avg"].shape == (4, 3)


def test_shards_on_the_cpu_in_a_group_without_the_cpu_are_refused(group: Callable[[str], None]) -> None:
    """Also in one that the user has made."""
    group("nccl")
    strategy: Any = _on_cuda(FSDPStrategy(cpu_offload=True, process_group_backend="nccl"))
    with pytest.raises(MisconfigurationException, match=r"cpu_offload=True.*\(cuda:fake\) does not support CPU"):
        strategy._shard(torch.nn.Linear(2, 2))


def _bound() -> tuple[list[list[float]], bool]:
    whole: Any = dist.new_group(backend="gloo")
    whole.bound_device_id = CUDA  # as NCCL's
    try:
        comm.barrier(whole)  # torch's own would ask for a tensor on the GPU
        return comm.all_gather_tensor(torch.tensor([float(dist.get_rank())]), whole).tolist(), True
    finally:
        dist.destroy_process_group(whole)


def test_a_barrier_of_a_group_that_is_bound_to_a_device_goes_by_the_host(ranks: RankPool) -> None:
    assert ranks(2).run(_bound) == [([[0.0], [1.0]], True)] * 2


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_that_has_failed_aborts_what_is_queued(
    failed: bool, group: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's shutdown ends what is queued first: a rank that failed while others were gone hung until it was killed."""
    did = []
    group("cpu:gloo,cuda:nccl")
    monkeypatch.setattr(ranks, "settle", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: did.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: did.append("aborted"))
    monkeypatch.setattr(sys, "last_value", ValueError() if failed else None, raising=False)
    ranks._leave_group()
    monkeypatch.undo()
    assert did == ["aborted" if failed else "destroyed"]
