"""Rows of numbers that ranks tell one another now and read later, when they are there: nobody waits for a message."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground import comm
from lockstep.ground.pages import close_handle, common_pages, on_one_host
from lockstep.ground.rank import waits


class RowExchange:
    """A row of each rank, told at one boundary and heard at a later one, alike on all ranks.

    Ranks on one host write into memory that they share, where each passes a blocking reduction of all ranks between
    telling and hearing: who hears then hears what all have told. Others gather rows asynchronously, over the
    connections that the ranks' group has where that is a gloo group, else over a group of their own. Rows lie in two
    places in turn, so that none is overwritten while somebody still reads it.

    Args:
        width: numbers of a row.
        group: the ranks.
        synced: whether there is such a reduction between each `tell` and the `hear` that follows.
        alone: this process tells itself, whatever group there is.

    Attributes:
        is_told: whether a row was told and not yet heard.

    Example:
        >>> rows = RowExchange(2)
        >>> rows.tell([1.0, 2.0])
        >>> rows.hear()
        [(1.0, 2.0)]
    """

    def __init__(self, width: int, group: comm.Group = None, *, synced: bool = False, alone: bool = False) -> None:
        self._world, self._rank = (1, 0) if alone else (comm.world_size(group), comm.rank(group))
        self._row = Struct(f"={width + 1}d")  # its number, and the row
        self._count = 0  # rows told
        self.is_told = False
        self._group: comm.Group = None
        self._is_own = False
        self._page: mmap.mmap | None = None
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._own: tuple[float, ...] = ()
        if self._world == 1:
            return
        if synced and dist.get_backend(group) == "gloo":
            self._page = _shared(2 * self._world * self._row.size, group)
        if self._page is not None:
            return
        if comm.backend_of(group, "cpu") == "gloo":
            self._group = dist.group.WORLD if group is None else group
        else:
            members = None if group is None else dist.get_process_group_ranks(group)
            self._group = dist.new_group(members, backend="gloo", use_local_synchronization=members is not None)
            self._is_own = True
            comm.barrier(self._group)  # all are connected before one may leave

    def tell(self, row: Sequence[float]) -> None:
        """Tell the other ranks this one's row."""
        self._count += 1
        self.is_told = True
        if self._page is not None:
            self._row.pack_into(self._page, self._place(self._rank), self._count, *row)
        elif self._group is None:
            self._own = tuple(row)
        else:
            mine = torch.tensor(row, dtype=torch.float64)
            rows = torch.empty(self._world, len(mine), dtype=torch.float64)
            self._sent = dist.all_gather(list(rows), mine, group=self._group, async_op=True), rows

    @waits()
    def hear(self) -> list[tuple[float, ...]]:
        """The rows of all ranks that were told last, by rank.

        Raises:
            RuntimeError: a rank has not told its row: there was no reduction in between.
        """
        self.is_told = False
        if self._page is not None:
            found = [self._row.unpack_from(self._page, self._place(rank)) for rank in range(self._world)]
            if any(row[0] != self._count for row in found):
                raise RuntimeError(f"RowExchange: row {self._count} was asked for before all ranks had told it")
            return [row[1:] for row in found]
        if self._sent is None:
            return [self._own]
        (work, rows), self._sent = self._sent, None
        work.wait()
        return [tuple(row) for row in rows.tolist()]

    def _place(self, rank: int) -> int:
        return ((self._count & 1) * self._world + rank) * self._row.size

    @waits()
    def close(self) -> None:
        """Give back the memory or the group."""
        if self._page is not None:
            self._page.close()
            self._page = None
        if self._sent is not None:
            with contextlib.suppress(RuntimeError):  # a rank that is gone cannot answer any more
                self._sent[0].wait(timedelta(seconds=5))
            self._sent = None
        if self._is_own and comm.is_distributed():
            dist.destroy_process_group(self._group)
        self._group, self._is_own = None, False


def _shared(size: int, group: comm.Group) -> mmap.mmap | None:
    """Memory that all ranks have mapped, or None on all where that cannot be."""
    pages = common_pages(group, size, on_disk=True) if on_one_host(group) else None
    close_handle(pages)
    return None if pages is None else pages.memory
