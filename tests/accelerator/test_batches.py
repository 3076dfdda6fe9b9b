"""A batch's way to the device: nothing is made on the CPU that the copy would have to wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import LightningModule
from lockstep.loop.hooks import Transfer


class Before(LightningModule):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch.append("before")
        return batch


@pytest.mark.parametrize(("kind", "made"), [("cuda", ["moved", "cast"]), ("cpu", ["cast"])])
def test_a_batch_is_cast_on_its_device(kind: str, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast on the CPU a batch is in memory that is not pinned: its copy waited for all that the device had to do."""

    def told(word: str) -> Any:
        return lambda batch, *_: [*batch, word]

    precision = SimpleNamespace(convert_input=told("cast"))
    strategy: Any = SimpleNamespace(root_device=torch.device(kind), precision=precision)
    monkeypatch.setattr(LightningModule, "transfer_batch_to_device", told("moved"))
    moves = {} if kind == "cpu" else {"transfer_batch_to_device": told("moved")}
    transfer = Transfer(LightningModule(), None, strategy)
    transfer.use(moves)
    assert transfer([]) == made
    with_hook = Transfer(Before(), None, strategy)
    with_hook.use({**moves, "on_before_batch_transfer": with_hook.hooks["on_before_batch_transfer"]})
    assert with_hook([]) == ["cast", "before", *(["moved"] if kind == "cuda" else [])]  # the hook sees the cast
