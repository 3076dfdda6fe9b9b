"""Pinned memory is cut from blocks: tensor by tensor it takes up to twice as much."""

from __future__ import annotations

import io
import weakref

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.io import snapshot
from lockstep.ground import transfer
from lockstep.ground.transfer import HostMemory, ReusedCopies, power_of_two

GPU = torch.device("cuda", 0)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Blocks that were asked for, in memory that is not pinned."""
    made: list[weakref.ref[Tensor]] = []

    def pinned(length: int) -> Tensor:
        assert length == power_of_two(length)
        block = torch.zeros(length, dtype=torch.uint8)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(transfer, "has_pinned_memory", lambda kind: kind == "cuda")
    monkeypatch.setattr(transfer, "_pinned", pinned)
    return made


def test_a_copy_has_a_storage_of_its_own(blocks: list[weakref.ref[Tensor]]) -> None:
    memory = HostMemory(GPU)
    like = torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    first, second = memory.like(like), memory.like(like)
    assert (first.shape, first.stride(), first.dtype) == (like.shape, like.stride(), like.dtype)
    assert first.untyped_storage().nbytes() == like.nbytes
    assert first.data_ptr() != second.data_ptr()
    file = io.BytesIO()
    torch.save(first.fill_(2.0), file)
    assert file.getbuffer().nbytes < 4000
    assert memory.like(torch.empty(0, 3)).shape == (0, 3)
    assert not HostMemory(torch.device("cpu")).like(like).is_pinned()


def test_copies_of_a_checkpoint_lie_in_memory_that_is_used_again(
    blocks: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the earlier checkpoint is written and let go of, and not before."""
    monkeypatch.setattr(transfer, "has_pinned_memory", lambda kind: True)
    weight, other = torch.arange(6.0), torch.ones(6)
    state = {"weight": weight, "part": weight[2:4], "other": other, "step": 3}
    memory = ReusedCopies()
    first = snapshot(state, memory)
    places = [first[name].data_ptr() for name in ("weight", "other")]
    second = snapshot(state, memory)
    assert second["weight"].data_ptr() not in places
    assert second["part"].data_ptr() == second["weight"].data_ptr() + 8
    del first
    weight.fill_(7.0)
    third = snapshot(state, memory)
    assert sorted(third[name].data_ptr() for name in ("weight", "other")) == sorted(places)
    assert third["weight"].tolist() == [7.0] * 6
    assert second["weight"].tolist() == list(range(6))
    assert (third["other"].tolist(), third["step"]) == ([1.0] * 6, 3)
    assert len(blocks) == 1
