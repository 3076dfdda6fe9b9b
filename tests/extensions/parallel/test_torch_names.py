"""What torch's own libraries, and others, do with torch's container works with ours: they ask for its class."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool


def _net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def _batches(step: int) -> Tensor:
    return torch.randn(2, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _is_one(grads: list[Tensor | None], step: int) -> bool:
    """Whether these are the gradients of one process."""
    net = _net()[::2]
    for batch in _batches(step):
        (net(batch).square().sum() / 2).backward()
    pairs = zip(grads, (p.grad for p in net.parameters()), strict=True)
    return all(a is not None and b is not None and torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs)


def _saved() -> list[list[str]]:
    found = []
    for make in (DistributedDataParallel, nn.parallel.DistributedDataParallel):
        model = make(_net())
        optimizer = torch.optim.Adam(model.parameters())
        model(_batches(0)[0]).sum().backward()
        optimizer.step()
        weights, state = get_state_dict(model, optimizer)
        found.append([*weights, *state["state"]])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return found


def test_names_in_a_distributed_checkpoint_are_those_of_torchs_container(ranks: RankPool) -> None:
    """They began with "module.", so that neither could read what the other had written."""
    for ours, theirs in ranks(2).run(_saved):
        assert ours == theirs
        assert not any(name.startswith("module.") for name in ours)


def _in_a_pipeline() -> list[tuple[bool, int]]:
    rank = dist.get_rank()
    groups = [dist.new_group([one]) for one in range(2)]
    model = DistributedDataParallel(_net()[::2])
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[rank])
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: output.square().sum(), scale_grads=False)
    found = []
    for step in range(3):
        model.zero_grad()
        schedule.step(_batches(step)[rank], target=torch.zeros(8, 1))
        found.append((_is_one([p.grad for p in model.parameters()], step), model.reducer.rounds))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return found


def test_a_pipeline_reduces_once_a_step(ranks: RankPool) -> None:
    """It reduced once a microbatch; torch's container fails there in the second step."""
    assert ranks(2).run(_in_a_pipeline) == [[(True, 1), (True, 2), (True, 3)]] * 2


def _asked_for() -> list[Any]:
    rank = dist.get_rank()
    model = DistributedDataParallel(_net()[::2])
    with model.no_sync():
        outputs = model(_batches(0)[rank])
        (outputs.square().sum() / 2).backward(retain_graph=True)
        alone = model.reducer.rounds
        model.reducer.prepare_for_backward([])
        (outputs.square().sum() / 2).backward()
        right = _is_one([p.grad for p in model.parameters()], 0)
        model(_batches(0)[rank]).sum().backward()
    return [alone, model.reducer.rounds, right]


def test_a_reducer_can_be_asked_for_the_next_backward(ranks: RankPool) -> None:
    assert ranks(2).run(_asked_for) == [[0, 1, True]] * 2


def _steps_in_a_hook() -> list[float]:
    """How far apart from one process, at most, parameters are that torch's hook steps bucket by bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which compiles and warns

    rank = dist.get_rank()
    found = []
    for shard in (False, True):
        model, one = DistributedDataParallel(_net()[::2], bucket_cap_mb=1e-5), _net()[::2]
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        with mock.patch.object(dist, "get_backend", return_value="nccl"):  # with gloo torch refuses
            hook = hook_with_zero_step(allreduce_hook, model, zero, shard_buckets=shard)
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(5):
            model.zero_grad()
            optimizer.zero_grad()
            model(_batches(step)[rank]).square().mean().backward()
            if step > 1:  # the hook steps from then on
                for batch in _batches(step):
                    (one(batch).square().mean() / 2).backward()
                optimizer.step()
            pairs = zip(model.parameters(), one.parameters(), strict=True)
            found.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
    return found


@pytest.mark.filterwarnings("ignore:.*ZeroRedundancyOptimizer")
def test_torchs_hooks_that_step_an_optimizer_find_the_layout_settled(ranks: RankPool) -> None:
    """They asked the container for a name that it did not have."""
    for found in ranks(2).run(_steps_in_a_hook):
        assert len(found) == 10
        assert max(found) <= 1e-12


def _wrapped_twice() -> list[bool]:
    rank = dist.get_rank()
    found = []
    for static in (False, True):
        inner = DistributedDataParallel(_net()[::2])
        outer = DistributedDataParallel(inner, static_graph=static)
        for step in range(4):
            for model in (outer, inner):
                outer.zero_grad()
                model(_batches(step)[rank]).square().sum().backward()
                found.append(_is_one([p.grad for p in model.parameters()], step))
        rounds = (outer.reducer.rounds, inner.reducer.rounds)
        found.append(rounds == (4, 4))
    try:
        DistributedDataParallel(inner, device_ids=["cpu", "cpu"])
    except ValueError as error:
        found.append("Wrap the model inside it" in str(error))
    return found


def test_a_container_that_is_wrapped_again_is_averaged_once(ranks: RankPool) -> None:
    """Both put their buffers in the parameters' gradients, which came out wrong; one of torch's tests does it."""
    for found in ranks(2).run(_wrapped_twice):
        assert found == [True] * 19


def test_a_container_is_one_of_torchs() -> None:
    assert issubclass(DistributedDataParallel, nn.parallel.DistributedDataParallel)
    assert not issubclass(nn.Module, nn.parallel.DistributedDataParallel)


def test_accelerate_finds_the_module_inside(ranks: RankPool) -> None:
    pytest.importorskip("accelerate")
    assert ranks(2).run(_unwrapped) == [True, True]


def _unwrapped() -> bool:
    from accelerate.utils import extract_model_from_parallel

    net = _net()
    return extract_model_from_parallel(DistributedDataParallel(net)) is net
