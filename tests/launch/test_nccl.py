"""What is said about NCCL before the ranks are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.launch import nccl
from lockstep.launch.nccl import built_for, check_nccl, mapped, obstacle
from lockstep.strategies.ddp import DDPStrategy
from lockstep.trainer import Trainer

FINE: dict[str, Any] = {"device_type": "cuda", "available": True, "built": "13.0", "nccl": (13, 1), "driver": 13000}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"device_type": "cpu"}, "works between GPUs, and this run's devices are cpu.*'gloo'"),
        ({"available": False}, "built without NCCL: install .*'gloo'"),
        ({"nccl": (12, 9)}, r"built for CUDA 12\.9, and torch .* for CUDA 13\.0: install nvidia-nccl-cu13 again"),
        ({"driver": 12040}, r"built for CUDA 13\.1, and the driver .* knows CUDA 12\.4: update the driver"),
    ],
)
def test_what_cannot_work_is_named_with_the_way_out(
    wrong: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = obstacle(**{**FINE, **wrong})
    monkeypatch.setattr(nccl, "obstacle", lambda *found: reason)
    with pytest.raises(MisconfigurationException, match=f"process_group_backend='nccl': .*{says}"):
        check_nccl("cuda")


@pytest.mark.parametrize("fine", [{}, {"nccl": None}, {"driver": 0}, {"built": None}, {"built": "13.2"}])
def test_what_may_work_is_let_be(fine: dict[str, Any]) -> None:
    assert obstacle(**{**FINE, **fine}) is None


def test_the_library_that_is_loaded_tells_its_cuda(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0" * 5000 + b"NCCL version 2.27.5+cuda12.9\0" + b"\0" * 5000)
    lines = f"7f00-7f01 r--p 00000000 08:01 42    /usr/lib/libc.so.6\n7f02-7f03 r-xp 00000000 08:01 43    {library}\n"
    assert mapped(lines) == library
    assert built_for(library) == (12, 9)
    assert mapped("7f00-7f01 r--p 00000000 00:00 0\n") is None
    library.write_bytes(b"something else")
    assert built_for(library) is None
    library.write_bytes(b"")
    assert built_for(library) is None
    assert built_for(tmp_path / "none") is None


def test_a_library_that_goes_with_torch_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_is_installed", lambda package: package == "nvidia-nccl-cu13")
    assert nccl._of_the_same_cuda("13.0")
    assert not nccl._of_the_same_cuda("12.6")
    monkeypatch.setattr(nccl, "_is_installed", lambda package: package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))
    assert not nccl._of_the_same_cuda("13.0")  # one has written over the other


def test_it_is_said_by_the_trainer_before_anything_starts() -> None:
    with pytest.raises(MisconfigurationException, match=r"process_group_backend='nccl': NCCL works between GPUs"):
        Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="nccl"))
    Trainer(accelerator="cpu", devices=1, strategy=DDPStrategy(process_group_backend="gloo"))


@pytest.mark.gpu
def test_the_nccl_of_this_machine_is_right() -> None:
    assert torch.version.cuda is not None
    check_nccl("cuda")


def test_a_driver_that_is_too_old_is_named_where_no_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12040, raising=False)
    with pytest.raises(MisconfigurationException, match=r"CUDA 13\.0, and the driver .* CUDA 12\.4: update the driver"):
        Trainer(accelerator="gpu")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000)
    with pytest.raises(MisconfigurationException, match="finds no such device here: use"):
        Trainer(accelerator="gpu")
