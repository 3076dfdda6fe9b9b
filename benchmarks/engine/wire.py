"""What a rank sends in a step, and what the container keeps in memory: counted, not timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .methods import NONE, register
from .race import task, wrapped

SHARE: dict[str, Callable[[int], float]] = {
    # of the bytes that a rank hands over, those that it sends, in a ring of W ranks
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "broadcast": lambda world: (world - 1) / world,
    "all_gather": lambda world: world - 1,
    "all_gather_into_tensor": lambda world: world - 1,
    "all_gather_single": lambda world: world - 1,
    "reduce_scatter_tensor": lambda world: (world - 1) / world,
    "all_to_all_single": lambda world: (world - 1) / world,
}
PLACE = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_single": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
}
"""Which argument is what this rank gives; the first if not named."""


@contextlib.contextmanager
def counted() -> Iterator[dict[str, float]]:
    """While it is open: calls and bytes sent by this rank through ``torch.distributed``'s collectives."""
    found = {"calls": 0.0, "bytes": 0.0}
    before = {name: getattr(dist, name) for name in SHARE if hasattr(dist, name)}

    def wrap(name: str) -> Callable[..., Any]:
        original = before[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            found["calls"] += 1
            found["bytes"] += given[PLACE.get(name, 0)].nbytes * SHARE[name](dist.get_world_size())
            return original(*args, **kwargs)

        return call

    try:
        for name in before:
            setattr(dist, name, wrap(name))
        yield found
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def sent(model: str, hook: str, steps: int = 3) -> dict[str, float]:
    """Bytes and collectives of a step of our container over TCP with ``hook``, and what PowerSGD should send.

    Args:
        model: name of a `engine.race.task`.
        hook: a name in `engine.methods.HOOKS`.
        steps: those counted, after as many that are not (records, warm starts).
    """
    origin, loss, batch = task(model)
    runner = wrapped("lockstep, TCP", origin)
    register(runner, hook, 1)
    for number in range(steps):
        runner.zero_grad()
        loss(runner, batch(number)).backward()
    with counted() as found:
        for number in range(steps):
            runner.zero_grad()
            loss(runner, batch(number)).backward()
    return {name: value / steps for name, value in found.items()} | {
        "parameters": sum(parameter.nbytes for parameter in origin.parameters()),
        "low rank": low_rank_bytes(origin, 4),
    }


def low_rank_bytes(model: nn.Module, rank: int) -> int:
    """What (m + n) r for every matrix, where it is less than m n, and all of the others comes to, in bytes."""
    total = 0
    for parameter in model.parameters():
        rows, columns = parameter.shape[0], parameter[0].numel()
        kept = min(rank, rows, columns)
        whole = parameter.ndim < 2 or (rows + columns) * kept >= rows * columns
        total += parameter.nbytes if whole else (rows + columns) * kept * parameter.element_size()
    return total


def tensors_in(thing: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors that are reached from ``thing`` through attributes, dicts, lists and tuples."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        inside = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        inside = list(thing)
    elif type(thing).__module__.startswith(("lockstep", "torch.distributed.algorithms", "torch.utils.weak")):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        inside = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
    else:
        return []
    return [tensor for part in inside for tensor in tensors_in(part, seen)]


def bytes_of(tensors: list[Tensor]) -> int:
    """Of the different memories behind ``tensors``."""
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(memories.values())


def kept(model: str, kind: str, hook: str = NONE) -> dict[str, int]:
    """Bytes after a step: of the parameters, of gradients and buckets together, and of the hook's state.

    Args:
        model: name of a `engine.race.task`.
        kind: ours, as `engine.race.wrapped` names it.
        hook: a name in `engine.methods.HOOKS`.
    """
    origin, loss, batch = task(model)
    runner = wrapped(kind, origin)
    state = register(runner, hook, 1)
    for number in range(3):
        runner.zero_grad()
        loss(runner, batch(number)).backward()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in origin.parameters()}
    grads = [parameter.grad for parameter in origin.parameters() if parameter.grad is not None]
    buckets = tensors_in(runner.reducer)
    states = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(state)}
    theirs = [t for t in [*grads, *buckets] if t.untyped_storage().data_ptr() not in parameters | states]
    return {
        "parameters": bytes_of(list(origin.parameters())),
        "gradients and buckets": bytes_of(theirs),
        "hook": bytes_of(tensors_in(state)),
    }
