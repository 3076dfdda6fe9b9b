"""What tests of flags share: machines with GPUs, and without."""

from __future__ import annotations

import pytest
import torch


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
