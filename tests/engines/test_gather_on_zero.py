"""What each rank has comes to rank 0."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.engines.collectives import gather_on_zero
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


def mine(rank: int) -> dict[str, Any]:
    return {
        "words": ["a", rank, None],
        "state": {0: {"step": torch.tensor(float(rank)), "moment": torch.full((2 + rank, 3), rank).t()}},
        "kinds": (
            torch.tensor([rank, 1.5], dtype=torch.bfloat16),
            torch.tensor([True, False]),
            torch.empty(0, 3),
            torch.tensor([1 + rank * 1j]),
        ),
    }


def bring() -> list[Any]:
    return gather_on_zero(mine(dist.get_rank()))


def test_tensors_of_all_kinds_come_to_rank_0(ranks: RankPool) -> None:
    zero, one, two = ranks(3).run(bring)
    assert one == two == []
    for rank, found in enumerate(zero):
        expected = mine(rank)
        assert found["words"] == expected["words"]
        assert torch.equal(found["state"][0]["step"], expected["state"][0]["step"])
        assert torch.equal(found["state"][0]["moment"], expected["state"][0]["moment"])
        for tensor, other in zip(found["kinds"], expected["kinds"], strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)


def bring_alike() -> Any:
    """What came to rank 0, and the bytes that this rank has sent in tensors."""
    rank = dist.get_rank()
    sparse = torch.eye(2).to_sparse()
    mine = {"same": torch.arange(1000.0), "zeros": [torch.zeros(3), torch.zeros(3)], "own": torch.full((7,), rank)}
    if rank == 2:
        mine["zeros"] = [torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32)]
    sent = []
    own = dist.send
    with mock.patch.object(dist, "send", lambda tensor, to: (sent.append(tensor.nbytes), own(tensor, to))):
        found = gather_on_zero({**mine, "sparse": sparse}, alike=True)
    return found, sum(sent)


def test_what_rank_0_has_too_does_not_travel_and_is_there_once(ranks: RankPool) -> None:
    """Of manual optimization every rank's gradients were sent, and written, although all had the same."""
    (found, _), (_, of_one), (_, of_two) = ranks(3).run(bring_alike)
    assert (of_one, of_two) == (7 * 8, 7 * 8 + 3 * 4 + 3 * 4)
    for rank, part in enumerate(found):
        assert torch.equal(part["same"], torch.arange(1000.0))
        assert part["own"].tolist() == [rank] * 7
        assert part["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]
        zeros = part["zeros"]
        assert [zero.tolist() for zero in zeros] == [[0, 0, 0]] * len(zeros)
        assert len({zero.data_ptr() for zero in zeros}) == len(zeros), "two gradients of a rank have become one"
    assert found[2]["zeros"][3].dtype is torch.int32
