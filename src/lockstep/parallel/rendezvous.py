"""Points that all ranks pass alike, at any of which they may meet: who finds nothing there pays next to nothing."""

from __future__ import annotations

import mmap
import os
import secrets
import time

import torch.distributed as dist

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.pages import common_pages, on_one_host
from lockstep.parallel.shared import timeout_of

WAIT = 0.002
"""Seconds between two looks at whether the others have come."""


class Rendezvous:
    """Counts points that every rank of a group passes in the same order, and lets all ranks meet at one of them.

    A rank that has found something calls `meet` in the place of `reach`. If all of them have, they go on to their
    collectives together. If another rank has gone past the point, the one who waits raises: there the other's next
    collective would be another one than here, and both would hang.

    On one host each rank writes the number of its last point into memory that all of them see. Across hosts nobody
    sees how far another rank is; a rank that meets alone then waits as long as a collective of the group would.

    The constructor is collective.

    Args:
        group: the ranks; ``None`` is the default group.
    """

    def __init__(self, group: comm.Group = None) -> None:
        self._group = group
        self._rank, self._world = comm.rank(group), comm.world_size(group)
        self._number = 0  # of the last point
        self._page: mmap.mmap | None = None
        self._cells: memoryview | list[int] = [0] * self._world
        if self._world > 1:
            self._key = "lockstep/rendezvous/" + comm.broadcast_object(secrets.token_hex(8), 0, group)
            if on_one_host(group):
                self._share_cells()

    def _share_cells(self) -> None:
        size = -(-8 * self._world // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = common_pages(self._group, size, on_disk=True)
        if pages is not None:
            os.close(pages.handle)
            self._page, self._cells = pages.memory, memoryview(pages.memory).cast("q")

    def reach(self) -> None:
        """Pass the next point; 0.1 us."""
        self._number = number = self._number + 1
        self._cells[self._rank] = number

    def meet(self, found: str) -> None:
        """Wait at the next point until all ranks have come there to meet, then pass it.

        Args:
            found: what this rank has found, for the error.

        Raises:
            MisconfigurationException: another rank has passed the point, or did not come within the group's timeout.
        """
        number = self._number + 1
        if self._world > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{self._key}/{number}/{self._rank}", "1")
            until = time.monotonic() + timeout_of(self._group)
            for other in range(self._world):
                self._await(store, number, other, found, until)
            comm.barrier(self._group)  # nobody passes while another still looks
        self.reach()

    def _await(self, store: dist.Store, number: int, other: int, found: str, until: float) -> None:
        key = f"{self._key}/{number}/{other}"
        while not store.check([key]):
            passed = self._cells[other] >= number and not store.check([key])
            if passed or time.monotonic() > until:
                how = "came to the same point without" if passed else "did not come to the same point in time"
                raise MisconfigurationException(
                    f"rank {self._rank}: {found}, and rank {other} {how}: do it on every rank, at the same point of "
                    "the program; nothing in it may depend on the rank"
                )
            time.sleep(WAIT)

    def close(self) -> None:
        """Let go of the memory."""
        if self._page is not None:
            self._cells.release()  # type: ignore[union-attr]
            self._page.close()
            self._page, self._cells = None, [0] * self._world
