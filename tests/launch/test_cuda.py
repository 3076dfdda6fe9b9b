"""CUDA's variables: set where lockstep starts the ranks, left alone on a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.launch.environment import number_devices


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


USERS = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("by_a_cluster", "before", "after"),
    [
        (False, {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2"}),
        (False, USERS, USERS),
        (True, {}, {}),
    ],
)
def test_they_are_set_where_neither_the_user_nor_a_cluster_does(
    by_a_cluster: bool, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    number_devices(by_a_cluster, environ)
    assert environ == after


def test_others_get_the_names_of_gpus_that_this_process_has_counted_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 went on by speed and its children by the bus: on unlike GPUs two ranks took one card."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = [SimpleNamespace(name="Some GPU", uuid=f"0{number}-ab") for number in (2, 0, 1)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found[number])
    environ: dict[str, str] = {}
    number_devices(False, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "GPU-02-ab,GPU-00-ab,GPU-01-ab"}
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}
    number_devices(False, environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}
