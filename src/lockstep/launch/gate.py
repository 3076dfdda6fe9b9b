"""The gate before torch's collectives: each is noted, strided tensors are made whole, and ranks can compare what they
are about to do.

Two mistakes are silent on gloo: an all-reduce of a strided view leaves some of its elements as they were, and two
collectives of one size that ranks call in another order, or with another operation, mix up their data. The first is
mended here, always. The second is found in the ledgers within a second or two, after the fact (`lockstep.launch.hang`);
before the fact it costs a round through the ranks' store for each collective, on demand (`compared`).

Only calls through ``torch.distributed`` (and its ``distributed_c10d``) come by: those of FSDP, of metrics, and a user's
own. What a module has taken by ``from torch.distributed import all_reduce`` before the gate was put up does not, nor
what a compiled graph or C++ does. A group's own count of its collectives tells when that has happened.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.launch.noting import COLLECTIVES, FUNCTIONAL, MESSAGES, Noting
from lockstep.launch.sample import answer_by
from lockstep.launch.stack import calling

IN_PLACE = ("all_reduce", "reduce")
"""Collectives that gloo performs wrongly on strided views."""

COMPARED = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor",),
    "all_gather_into_tensor": ("input_tensor",),
    "reduce_scatter": ("output",),
    "reduce_scatter_tensor": ("input",),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "all_to_all": (),
    "all_to_all_single": (),
    "barrier": (),
}
"""Collectives, and the arguments whose shapes and dtypes all ranks have in common."""

LIKEWISE = ("op", "src", "dst", "group_src", "group_dst")
"""Further arguments that all ranks give alike."""


WAIT = timedelta(seconds=5)
"""How long this process asks the store at a time what the other ranks are about to do; signals are heard between."""


class CollectiveMismatch(RuntimeError):
    """Ranks are about to do different things in one collective."""


# -- strided tensors


class _Done:
    """The work of a collective that has been waited for."""

    def __init__(self, result: list[Tensor]) -> None:
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """A failure was raised when it happened."""
        return True

    def result(self) -> list[Tensor]:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that has its value."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.is_contiguous() or tensor.layout != torch.strided:
            return function(tensor, *args, **kwargs)
        given = inspect.signature(function).bind(tensor, *args, **kwargs)
        waits = not given.arguments.pop("async_op", False)
        given.arguments["tensor"] = copy = tensor.contiguous()
        work = function(*given.args, **given.kwargs)
        with torch.no_grad():
            tensor.copy_(copy)
        return work if waits else _Done([tensor])

    return whole


# -- what the ranks are about to do


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
        def compared(*args: Any, **kwargs: Any) -> Any:
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
        self._store.set(self._key(group, count, rank), f"{mine}\0{calling().place()}")
        found = self._wait([self._key(group, count, other) for other in ranks])
        # whoever has written this one has read those before it
        self._store.delete_key(self._key(group, count - 1, rank))
        if any(call != mine for call, _ in found):
            told = "; ".join(
                f"rank {other} calls {call} at {place}" for other, (call, place) in zip(ranks, found, strict=False)
            )
            raise CollectiveMismatch(
                f"the ranks are about to do different things in collective {count} of their group: {told}. "
                "All ranks must make the same calls in the same order"
            )

    def _wait(self, keys: list[str]) -> list[tuple[str, str]]:
        """What the ranks have written; waits until all have, which may take as long as a rank is busy elsewhere."""
        while True:
            try:
                self._store.wait(keys, WAIT)
                break
            except dist.DistStoreError:
                continue
        found = [value.decode().split("\0") for value in self._store.multi_get(keys)]
        return [(call, place) for call, place in found]

    @staticmethod
    def _key(group: dist.ProcessGroup, count: int, rank: int) -> str:
        return f"lockstep/gate/{group.group_name}/{count}/{rank}"


def _words(name: str, given: dict[str, Any]) -> Iterator[str]:
    for argument in COMPARED[name]:
        tensor = given[argument]
        yield f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    for argument in LIKEWISE:
        value = given.get(argument)
        if value is not None:
            yield f"{argument}={getattr(value, 'name', None) or str(value).removeprefix('RedOpType.')}"


# -- putting it up

_HOMES = (dist, dist.distributed_c10d)
_replaced: list[tuple[Any, str, Any]] = []
"""What stood where the gate stands: object, name, value."""
_noting: Noting | None = None


def put_up() -> None:
    """Have torch's collectives noted from here on, in this process, and strided tensors reduced rightly; once."""
    global _noting
    if not _replaced:
        _forget_in_children()
        _noting = noting = Noting()
        for name in COLLECTIVES:
            function = getattr(dist.distributed_c10d, name, None)
            if function is not None:
                _replace(name, _with_note(name, function))
        _put_up_messages(noting)
        _set(dist.Work, "wait", noting.waited(dist.Work.wait))
        noting.on_group = _take_in_functional
    _take_in_functional()


@functools.cache
def _forget_in_children() -> None:
    """Once: a process that is forked here must not write into this one's ledger. Its own gate, if any, has another."""
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    take_down()
    if _noting is not None:
        _noting.stop()


def _take_in_functional() -> None:
    """Note torch's functional collectives once they are imported: DTensor makes them, in groups that are new here."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and _noting is not None and not hasattr(functional.all_reduce, "is_gate"):
        for name in FUNCTIONAL:
            function = getattr(functional, name, None)
            if function is not None:
                _set(functional, name, _noting.functional(name, function))
        functional.all_reduce.is_gate = True


def take_down() -> None:
    """Put torch's own functions back: for what is to be measured or tested without the gate."""
    while _replaced:
        home, name, value = _replaced.pop()
        setattr(home, name, value)


def told_by(where: Callable[[], tuple[str, int]] | None) -> None:
    """Say who knows in which hook this rank is, and at which batch; None: nobody any more."""
    if _noting is not None:
        put_up()
        _noting.where = where
        answer_by(None if where is None else _noting.say)


def _with_note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    assert _noting is not None
    noted = _noting.collective(name, function, _whole(function) if name in IN_PLACE else None)
    noted.inner = function  # type: ignore[attr-defined]
    return noted


def _put_up_messages(noting: Noting) -> None:
    """Messages, too. A ``P2POp`` holds ``isend`` or ``irecv``, and torch asks which of them by their identity, so one
    that somebody has taken before is made the one of now."""
    c10d: Any = dist.distributed_c10d
    now = {}
    for name in MESSAGES:
        before = getattr(c10d, name)
        now[before] = noting.message(name, before)
        _replace(name, now[before])
    check, init = c10d._check_op, dist.P2POp.__init__

    def check_op(op: Any) -> None:
        check(now.get(op, op))

    @functools.wraps(init)
    def made(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        init(self, now.get(op, op), *args, **kwargs)

    _set(c10d, "_check_op", check_op)
    _set(dist.P2POp, "__init__", made)


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
    put_up()
    before = len(_replaced)
    comparison = _Comparison()
    for name in COMPARED:
        _replace(name, _with_note(name, comparison.wrap(name, getattr(dist, name).inner)))
    try:
        yield
    finally:
        while len(_replaced) > before:
            home, name, value = _replaced.pop()
            setattr(home, name, value)


def _replace(name: str, function: Callable[..., Any]) -> None:
    for home in _HOMES:
        if hasattr(home, name):
            _set(home, name, function)


def _set(home: Any, name: str, value: Any) -> None:
    _replaced.append((home, name, getattr(home, name)))
    setattr(home, name, value)
