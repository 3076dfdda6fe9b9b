"""Devices that are there and of no use: a GPU for which torch was not built, one that other processes fill."""

from __future__ import annotations

import warnings

import pytest
import torch

from lockstep.ground import usable
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.usable import check_usable, held_by_others, refuse_architecture, warn_of_others

GPU = torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(usable, "_told", set())


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((9, 0), ["sm_80", "sm_90"]),
        ((8, 9), ["sm_80", "sm_90"]),
        ((12, 0), ["sm_90", "compute_90"]),
        ((9, 0), ["sm_90a"]),
        ((10, 3), ["sm_100", "sm_120"]),
        ((10, 3), ["sm_100f"]),
        ((7, 0), []),
    ],
)
def test_a_gpu_for_which_there_is_code_is_taken(capability: tuple[int, int], built_for: list[str]) -> None:
    refuse_architecture(GPU, capability, built_for)


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((12, 0), ["sm_80", "sm_90"]),
        ((6, 1), ["sm_70", "compute_90"]),
        ((8, 0), ["sm_86"]),
        ((10, 3), ["sm_100a"]),
    ],
)
def test_a_gpu_for_which_torch_was_not_built_is_refused(capability: tuple[int, int], built_for: list[str]) -> None:
    says = rf"cuda:0 \(Some GPU\) has compute capability {capability[0]}\.{capability[1]}, .*{built_for[0]}.*a build of"
    with pytest.raises(MisconfigurationException, match=says):
        refuse_architecture(GPU, capability, built_for)


def test_it_is_refused_where_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    with pytest.raises(MisconfigurationException, match=r"compute capability 12\.0"):
        check_usable(GPU)
    check_usable(torch.device("cpu"))


def with_memory(free: int, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 80 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: own * GIB)


def test_a_card_that_others_fill_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(2, 1, monkeypatch)
    with pytest.warns(UserWarning, match=r"cuda:0: 2\.0 of 80\.0 GiB are free, and 77\.0 GiB belong to other"):
        warn_of_others(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_others(GPU)
    assert held_by_others(GPU) == 77 * GIB


@pytest.mark.parametrize(("free", "own"), [(40, 1), (9, 1), (2, 77)])
def test_a_card_with_room_or_filled_by_this_process_is_not(
    free: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(free, own, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_others(GPU)
