"""torch's meeting of several nodes, with the nodes in the order that the user has given them."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)


class InOrder(RendezvousHandler):
    """Gives the nodes of each round their numbers by ``--node-rank``, so that rank 0 is on the first of them.

    torch numbers them by host names and process ids. What the nodes tell each other goes through the store that torch
    has made for the round.

    Args:
        inner: torch's handler, which brings the nodes together.
        node_rank: the number that the user has given this node; None: none, and it comes behind those that have one.
        address: of this node, as the others know it; None: its host name.
    """

    def __init__(self, inner: RendezvousHandler, node_rank: int | None, address: str | None) -> None:
        self._inner = inner
        self._node_rank = node_rank
        self._address = address

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others of this round.

        Raises:
            RendezvousStateError: two nodes were given the same number.
        """
        met = self._inner.next_rendezvous()
        store = PrefixStore("lockstep", met.store)
        store.set_timeout(timedelta(seconds=60))
        store.set(f"node-{met.rank}", "" if self._node_rank is None else str(self._node_rank))
        given = [store.get(f"node-{rank}").decode() for rank in range(met.world_size)]
        twice = sorted({number for number in given if number and given.count(number) > 1})
        if twice:
            raise RendezvousStateError(f"--node-rank {twice[0]} is given on {given.count(twice[0])} of the nodes")
        order = sorted(range(met.world_size), key=lambda rank: (not given[rank], int(given[rank] or 0), rank))
        rank = order.index(met.rank)
        place = RendezvousStoreInfo.build(rank, store, self._address)
        return RendezvousInfo(met.store, rank, met.world_size, place)

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
