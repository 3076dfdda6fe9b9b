"""What is around strategy="dp": its name, its devices, flags that it refuses, complex batches, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep import callbacks
from lockstep.engines.table import drives_all_devices
from lockstep.extensions.parallel.dp.replicas import DataParallel
from lockstep.ground.errors import MisconfigurationException
from lockstep.memory.recompute import recompute
from lockstep.testing import check_equivalence
from tests.cluster.test_environments import Gpus, put
from tests.cluster.variables import TORCHRUN
from tests.loop.pieces import Slope, numbers, quiet
from tests.loop.test_lazy_layers import Lazy
from tests.loop.test_lazy_layers import rows as lazy_rows
from tests.precision.test_complex import FLAGS, Waves, rows


def test_its_name_drives_all_devices() -> None:
    assert drives_all_devices("dp")
    assert not drives_all_devices("ddp")


def test_one_process_for_all_devices_took_more_than_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher of one rank, where ``devices`` was read as a number of ranks."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    put(monkeypatch, TORCHRUN | alone | {"GROUP_WORLD_SIZE": "1"})
    monkeypatch.setattr("lockstep.trainer.find_accelerator", lambda asked: Gpus(4))
    strategy = quiet(accelerator="gpu", devices=2, strategy="dp").strategy
    assert [device.index for device in strategy.devices] == [0, 1]


def test_synchronized_norms_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r'sync_batchnorm=True.*strategy="ddp"'):
        quiet(strategy="dp", devices=2, sync_batchnorm=True)


@pytest.mark.extension("balancing")
def test_unequal_shares_are_refused_at_once() -> None:
    with pytest.raises(MisconfigurationException, match=r"Trainer\(balance=True\): \w+Strategy cannot.*ddp.*remove"):
        quiet(balance=True, strategy="dp", devices=2)


@pytest.mark.extension("balancing")
def test_a_monitor_that_cannot_tell_its_steps_apart_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"StragglerMonitor: DataParallelStrategy runs.*ddp"):
        quiet(strategy="dp", devices=2, callbacks=[callbacks.StragglerMonitor()]).fit(Slope(), numbers(8))


def test_lazy_layers_are_refused_by_name() -> None:
    said = r"DataParallelStrategy.*'net.0.weight'.*lazy layer.*configure_model"
    with pytest.raises(MisconfigurationException, match=said):
        quiet(strategy="dp").fit(Lazy(), lazy_rows())


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_it_takes_complex_batches(flags: dict[str, Any]) -> None:
    report = check_equivalence(Waves, rows, strategy="dp", devices=2, **flags)
    assert report, report


def test_replicas_are_recomputed_with_their_own_parameters() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    expected = DataParallel(net, ["cpu", "cpu"])(torch.ones(4, 6))
    recompute(net, nn.Sequential)
    found = DataParallel(net, ["cpu", "cpu"])(torch.ones(4, 6))
    assert torch.equal(expected, found)
    found.sum().backward()
    assert net[1][0].weight.grad is not None
