"""Several ranks on one card: what a Trainer makes of it, on a card that is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import Trainer
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import DDPStrategy
from lockstep.testing import SharedCard

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_ranks_share_the_card_and_speak_by_way_of_the_host() -> None:
    strategy = DDPStrategy()
    Trainer(accelerator=SharedCard(), devices=2, strategy=strategy, **QUIET)
    assert strategy.devices == [torch.device("cuda", 0)] * 2
    assert strategy.world.size == 2
    assert strategy.process_group_backend == "cpu:gloo,cuda:by_host"


def test_a_backend_that_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.engines.ranks._check_nccl", lambda device: None)
    strategy = DDPStrategy(process_group_backend="nccl")
    Trainer(accelerator=SharedCard(), devices=2, strategy=strategy, **QUIET)
    assert strategy.process_group_backend == "nccl"


@pytest.mark.parametrize("devices", [0, -1, [0, 0], "0,0", True])
def test_impossible_numbers_of_ranks_are_refused(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"SharedCard.*number of ranks"):
        SharedCard().get_parallel_devices(devices)
