"""Rows that ranks tell now and hear later, in memory that they share and by messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.ground.row_exchange import RowExchange
from lockstep.testing.pool import RankPool


def heard(synced: bool) -> tuple[list[Any], bool, bool]:
    rank = float(dist.get_rank())
    rows, found = RowExchange(2, synced=synced), []
    for number in range(5):
        rows.tell([rank, 10 * number + rank])
        dist.all_reduce(torch.ones(1))  # the reduction of a window
        assert rows.is_told
        found.append(rows.hear())
    assert not rows.is_told
    rows.tell([0.0, 0.0])
    shares, messages = rows._page is not None, rows._group is not None
    rows.close()
    return found, shares, messages


@pytest.mark.parametrize("synced", [True, False])
def test_all_ranks_hear_what_all_have_told(ranks: RankPool, synced: bool) -> None:
    for found, shares, messages in ranks(3).run(heard, synced):
        assert found == [[(float(rank), 10.0 * number + rank) for rank in range(3)] for number in range(5)]
        assert (shares, messages) == (synced, not synced)


def early() -> str:
    rows = RowExchange(1, synced=True)
    if dist.get_rank() == 0:
        rows.tell([1.0])
        with pytest.raises(RuntimeError) as told:
            rows.hear()
    dist.barrier()
    rows.close()
    return str(told.value) if dist.get_rank() == 0 else ""


def test_a_row_that_was_not_told_is_not_made_up(ranks: RankPool) -> None:
    assert "before all ranks had told it" in ranks(2).run(early)[0]


def alone() -> list[Any]:
    rows = RowExchange(1, alone=True)
    rows.tell([float(dist.get_rank())])
    found = rows.hear()
    rows.close()
    return found


def test_a_process_may_be_alone_in_a_group(ranks: RankPool) -> None:
    assert ranks(2).run(alone) == [[(0.0,)], [(1.0,)]]
