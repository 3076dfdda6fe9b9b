"""Comparing what ranks are about to do, before they do it: calls that do not fit together are named, and not made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.ground.collectives import COLLECTIVES
from lockstep.ground.rank import waits
from lockstep.supervise.collective_trace import wrapped
from lockstep.supervise.stack import calling

COMPARED = ("all_to_all", *(name for name in COLLECTIVES if COLLECTIVES[name]), "barrier")
"""Collectives that are compared."""

UNEVEN = ("all_to_all_single",)
"""Those of them to which ranks may bring other shapes."""

LIKEWISE = ("op", "src", "dst", "group_src", "group_dst")
"""Further arguments that all ranks give alike."""


WAIT = timedelta(seconds=5)
"""How long this process asks the store at a time what the other ranks are about to do; signals are heard between."""


class CollectiveMismatch(RuntimeError):
    """Ranks are about to do different things in one collective."""


class _Comparison:
    """Compares each collective with the other ranks', through the store over which they have met.

    A group of its own would do, but torch names the groups of some ranks by how many groups a rank has, which may
    differ, and such a group never comes together.
    """

    def __init__(self) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._counts: dict[str, int] = {}
        self._inside = False

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with a comparison before it."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def compared(*args: object, **kwargs: object) -> Any:
            if not self._inside:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                self._inside = True
                try:
                    self._compare(name, given.arguments)
                finally:
                    self._inside = False
            return function(*args, **kwargs)

        return compared

    def _compare(self, name: str, given: dict[str, Any]) -> None:
        group = given.get("group") or dist.group.WORLD
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_world_size(group) == 1:
            return
        count = self._counts[group.group_name] = self._counts.get(group.group_name, 0) + 1
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        mine = f"{name}({', '.join(_words(name, given))})"
        self._store.set(self._key(group, count, rank), f"{mine}\0{calling().location()}")
        found = self._wait([self._key(group, count, other) for other in ranks])
        # whoever has written this one has read those before it
        self._store.delete_key(self._key(group, count - 1, rank))
        if any(call != mine for call, _ in found):
            told = "; ".join(
                f"rank {other} calls {call} at {location}"
                for other, (call, location) in zip(ranks, found, strict=False)
            )
            raise CollectiveMismatch(
                f"the ranks are about to do different things in collective {count} of their group: {told}. "
                "All ranks must make the same calls in the same order"
            )

    @waits("comparing what the ranks are about to do")
    def _wait(self, keys: list[str]) -> list[tuple[str, str]]:
        """What the ranks have written; waits until all have, which may take as long as a rank is busy elsewhere."""
        while True:
            try:
                self._store.wait(keys, WAIT)
                break
            except dist.DistStoreError:
                continue
        found = [value.decode().split("\0") for value in self._store.multi_get(keys)]
        return [(call, location) for call, location in found]

    @staticmethod
    def _key(group: dist.ProcessGroup, count: int, rank: int) -> str:
        return f"lockstep/gate/{group.group_name}/{count}/{rank}"


def _words(name: str, given: dict[str, Any]) -> Iterator[str]:
    if COLLECTIVES[name] and name not in UNEVEN:
        tensor = given[COLLECTIVES[name]]
        yield f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    for argument in LIKEWISE:
        value = given.get(argument)
        if value is not None:
            yield f"{argument}={getattr(value, 'name', None) or str(value).removeprefix('RedOpType.')}"


@contextmanager
def compared() -> Iterator[None]:
    """Inside, the ranks compare each collective before they begin it; it costs a look into the store that
    they share, and the wait for the slowest.

    Compared are the name, the reduction, source or destination, shape and dtype, and with them the order. Messages
    from rank to rank are not.

    Raises:
        CollectiveMismatch: on every rank of the group, in place of the collective: they are about to do different
            things. It says which, and where.
    """
    with wrapped(_Comparison().wrap, COMPARED):
        yield
