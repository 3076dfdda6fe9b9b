"""What tests of flags share: Lightning, to compare with, and machines with GPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def lightning() -> Any:
    """``lightning.pytorch``; the test is skipped where it is not installed."""
    before = os.environ.copy()
    library = pytest.importorskip("lightning.pytorch")
    for name in set(os.environ) - set(before):  # its import sets variables
        del os.environ[name]
    return library


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs, as far as flags can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
