"""Padding batches for ranks without samples. After each padding batch, the module's state is restored.

Manual optimization runs ``training_step`` on every rank, even if a rank has no samples of a batch: the rank then gets a
sample of another rank. An engine whose forwards communicate needs padding batches in evaluations too. Restored
are, in the module and all modules inside it:

- buffers, and the random states of this process;
- metrics of torchmetrics, as submodules or anywhere in the following;
- attributes that are numbers, strings, tensors, or lists, dicts, sets and deques of these. Containers stay the same
  objects. New attributes are removed;
- the same attributes of objects whose class is from the module's own package, wherever they are found in these.

Not restored are parameters and optimizers, which get the other ranks' gradients; states of objects from other packages;
globals; files, and data that was sent elsewhere. Code that writes there may check ``trainer.is_padding_batch``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.ground.seed import random_states, set_random_states
from lockstep.loop.metrics import is_metric, restore_states, snapshot

if TYPE_CHECKING:
    from torchmetrics import Metric

    from lockstep.engines.strategy import Strategy
    from lockstep.loop.session import Session

PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_TORCH = frozenset(vars(nn.Module()))  # _parameters, _buffers, hooks, ...

Restore = Callable[[], None]


@contextmanager
def padding(session: Session) -> Iterator[None]:
    """Run the ``with`` block as a padding batch, without weight, and restore the module afterwards."""
    session.is_padding = True
    try:
        with session.strategy.zero_weight() as own_buffers, without_trace(session.module, own_buffers):
            yield
    finally:
        session.is_padding = False


NONE_LEFT = 2**62
"""Loader number with which a rank reports that it has no further batch."""


def in_step(
    batches: Iterable[tuple[Any, int, int, float]], strategy: Strategy
) -> Iterator[tuple[Any, int, int, float, bool]]:
    """Yield this rank's evaluation batches, and padding batches while other ranks still have batches. Collective.

    Args:
        batches: this rank's (batch, batch_idx, dataloader_idx, weight).
        strategy: the strategy of the run.

    Yields:
        (batch, batch_idx, dataloader_idx, weight, is_padding). A padding batch repeats this rank's last batch from that
            loader, or is a batch of another rank.
    """
    rank, mine = strategy.world.rank, iter(batches)
    item = next(mine, None)
    latest: Any = None
    of_loader = [NONE_LEFT] * strategy.world.size  # by rank: the loader of its latest batch
    while True:
        here, own = ((NONE_LEFT, 0), None) if item is None else ((item[2], item[1]), item[0])
        ahead = [tuple(row) for row in strategy.gather_stacked(torch.tensor(here)).tolist()]
        loader, number = first = min(ahead)
        if loader == NONE_LEFT:
            return
        has = [at == first for at in ahead]  # the ranks that still have this batch, at least one
        # ranks that have no batch of this loader, and had none before that they could repeat
        borrows = [not own and newest != loader for own, newest in zip(has, of_loader, strict=True)]
        if any(borrows):
            lent = strategy.broadcast(own if has[rank] else None, has.index(True))
            latest = lent if borrows[rank] else latest
        of_loader = [loader if has[other] or borrows[other] else before for other, before in enumerate(of_loader)]
        if has[rank]:
            assert item is not None
            latest = own
            yield *item, False
            item = next(mine, None)
        else:
            yield latest, number, loader, 0.0, True


@contextmanager
def without_trace(module: nn.Module, buffers: Iterable[Tensor]) -> Iterator[None]:
    """Restore the state of ``module`` after the ``with`` block; the docstring of this file lists what is restored.

    Args:
        module: the user's module.
        buffers: buffers of ``module`` that only this rank changes.
    """
    states = random_states()
    packages = (kind.__module__.partition(".")[0] for kind in type(module).__mro__)
    # torch's FSDP derives a class of its own from the user's
    seen = _SeenObjects(next(package for package in packages if package != "torch"))
    restores = [_tensor_restorer(buffer) for buffer in buffers]
    # a metric restores its attributes itself: its states may be lists that `reset` empties in place
    for part in module.modules():
        restores.append(_metric_restorer(part, seen) if is_metric(part) else _attributes_restorer(part, seen))
    try:
        yield
    finally:
        for restore in restores:
            restore()
        set_random_states(states)


class _SeenObjects(dict[int, Any]):
    """Dict of visited objects by id. It keeps the objects alive, so that no other object gets the same id.

    Args:
        package: package of the user's module, whose objects are visited.
    """

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package

    def is_users(self, value: object) -> bool:
        """Return True if ``value`` has a class from the user's package. Attributes of such objects are restored."""
        kind = type(value)
        own = kind.__module__.partition(".")[0] == self.package and self.package not in ("lockstep", "torch")
        return own and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))


def _attributes_restorer(owner: object, seen: _SeenObjects) -> Restore:
    attributes = vars(owner)
    known = set(attributes)
    # parameters and buffers are torch's attributes, which others treat
    kept = {name: value for name, value in attributes.items() if name not in OF_TORCH and _is_state(value, seen)}
    inside = [_value_restorer(value, seen) for value in kept.values()]

    def restore() -> None:
        for name in [name for name, value in attributes.items() if name not in known and _is_state(value, seen)]:
            del attributes[name]
        attributes.update(kept)
        _all(inside)

    return restore


def _is_state(value: object, seen: _SeenObjects) -> bool:
    return (
        isinstance(value, (*PLAIN, Tensor, list, dict, set, deque, tuple)) or is_metric(value) or seen.is_users(value)
    )


def _value_restorer(value: object, seen: _SeenObjects) -> Restore:
    """Return a function that restores the contents of ``value`` in place."""
    if isinstance(value, (*PLAIN, nn.Parameter)) or id(value) in seen:
        return _nothing
    seen[id(value)] = value
    if is_metric(value):
        return _metric_restorer(value, seen)
    if isinstance(value, Tensor):
        return _tensor_restorer(value)
    if isinstance(value, tuple):
        inside = [_value_restorer(item, seen) for item in value]
        return lambda: _all(inside)
    if isinstance(value, dict):
        return _container_restorer(value, dict(value), value.values(), value.update, seen)
    if isinstance(value, (list, deque)):
        return _container_restorer(value, list(value), value, value.extend, seen)
    if isinstance(value, set):
        return _container_restorer(value, set(value), (), value.update, seen)
    return _attributes_restorer(value, seen) if seen.is_users(value) else _nothing


def _container_restorer(
    container: Any, copied: Any, items: Iterable[Any], fill: Callable[[Any], Any], seen: _SeenObjects
) -> Restore:
    inside = [_value_restorer(item, seen) for item in list(items)]

    def restore() -> None:
        container.clear()
        fill(copied)
        _all(inside)

    return restore


def _tensor_restorer(tensor: Tensor) -> Restore:
    if tensor.is_inference() or tensor.layout is not torch.strided:
        return _nothing
    # in-place changes raise the version: an unchanged tensor is not copied back
    before, version = tensor.detach().clone(), tensor._version

    @torch.no_grad()
    def restore() -> None:
        if tensor._version != version:
            tensor.copy_(before)

    return restore


def _metric_restorer(metric: Metric, seen: _SeenObjects) -> Restore:
    seen[id(metric)] = metric
    return partial(restore_states, snapshot(metric))


def _all(restores: list[Restore]) -> None:
    for restore in restores:
        restore()


def _nothing() -> None:
    pass
