"""CUDA's variables: set where lockstep starts the ranks, left alone on a cluster."""

from __future__ import annotations

import pytest
import torch

from lockstep.launch.environment import number_devices


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


@pytest.mark.usefixtures("three_gpus")
def test_they_are_set_on_ones_own_machine() -> None:
    environ: dict[str, str] = {}
    number_devices(False, environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2"}


@pytest.mark.usefixtures("three_gpus")
def test_the_users_stay() -> None:
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": ""}
    number_devices(False, environ)
    assert environ == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.usefixtures("three_gpus")
def test_on_a_cluster_nothing_is_set() -> None:
    environ: dict[str, str] = {}
    number_devices(True, environ)
    assert environ == {}


def test_torch_without_cuda_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    environ: dict[str, str] = {}
    number_devices(False, environ)
    assert environ == {}
