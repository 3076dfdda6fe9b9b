"""A process group that the user has made before the fit: what it does not carry is said with the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lockstep import strategies
from lockstep.cluster.world import World
from lockstep.engines.ranks import RankedStrategy
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from tests.tools.extensions import is_there


def checked(strategy: RankedStrategy, backends: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a strategy, of two ranks on a kind of device, look at a group with these backends."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    strategy._root_device = torch.device(kind, 0)
    strategy.devices = [torch.device(kind, 0), torch.device(kind, 1)]
    strategy.collectives.world = replace(World.single(), size=2)
    strategy._check_group()


def test_a_group_of_nccl_alone_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lockstep"):
        checked(DDPStrategy(), "cuda:nccl", "cuda", monkeypatch)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("The existing process group (cuda:nccl) does not support CPU tensors")
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in line


def test_a_group_of_nccl_alone_is_refused_where_parameters_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    says = r'parameters on the CPU, .*\(cuda:nccl\) does not support CPU tensors. .*"cpu:gloo,cuda:nccl"'
    with pytest.raises(MisconfigurationException, match=says):
        checked(FSDPStrategy(cpu_offload=True), "cuda:nccl", "cuda", monkeypatch)


@pytest.mark.parametrize(
    ("backends", "kind", "wanted"),
    [("cuda:nccl", "cpu", "gloo"), ("cpu:gloo,cuda:nccl", "xpu", "cpu:gloo,xpu:xccl")],
)
def test_a_group_that_does_not_carry_the_devices_is_refused(
    backends: str, kind: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = rf'\({backends}\) does not support tensors on {kind!r} devices.*init_process_group\("{wanted}"\)'
    with pytest.raises(MisconfigurationException, match=says):
        checked(DDPStrategy(), backends, kind, monkeypatch)


@pytest.mark.parametrize("backends", ["gloo", "cpu:gloo,cuda:gloo"])
def test_gloo_is_refused_for_parts_of_parameters_on_a_gpu(backends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks were killed by SIGSEGV in the first step: gloo reads memory of the device as the host's."""
    on_gpu: list[RankedStrategy] = [FSDPStrategy()]
    by_host: list[RankedStrategy] = [DDPStrategy(), FSDPStrategy(cpu_offload=True)]
    if is_there("balancing"):
        on_gpu.append(strategies.BalancedStrategy())
        by_host.append(strategies.BalancedStrategy(one_process=True))
    for strategy in on_gpu:
        strategy._root_device = torch.device("cuda", 0)
        with pytest.raises(MisconfigurationException, match=r'gloo implements only all-reduce .*"cpu:gloo,cuda:nccl"'):
            strategy._check_reach(backends)
    for strategy in by_host:
        strategy._root_device = torch.device("cuda", 0)
        strategy._check_reach(backends)
    with pytest.raises(MisconfigurationException, match=r"FSDPStrategy cannot use .* backend 'cpu:gloo,cuda"):
        checked(FSDPStrategy(), "cpu:gloo,cuda:gloo", "cuda", monkeypatch)


def test_a_group_that_carries_all_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    checked(DDPStrategy(), "cpu:gloo,cuda:nccl", "cuda", monkeypatch)
    checked(DDPStrategy(), "cpu:gloo,cuda:gloo", "cpu", monkeypatch)
    assert not caplog.records


def test_ranks_on_devices_that_no_backend_carries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = DDPStrategy()
    with pytest.raises(MisconfigurationException, match=r"backend 'gloo' does not support .* 'mps' .*Use devices=1"):
        strategy.connect(replace(World.single(), size=2), torch.device("mps", 0), strategy.precision)
