"""States of torchmetrics objects: kept by loader, put back, and made ready for the reduction over the ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, distributed, nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

if TYPE_CHECKING:
    from torchmetrics import Metric

    from lockstep.engines.strategy import Strategy

# of a metric and the metrics inside it: (metric, states, updates, last result, last forward's result)
Snapshot = list[tuple["Metric", dict[str, Any], int, Any, Any]]


def is_metric(value: object) -> TypeGuard[Metric]:
    """Whether ``value`` is a torchmetrics object (never imports torchmetrics: who has one has imported it)."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def parts_of(metric: Metric) -> list[Metric]:
    """The metric and those inside it, in one order on all ranks."""
    return [part for part in metric.modules() if is_metric(part)]


def snapshot(metric: Metric) -> Snapshot:
    """What a metric has collected."""
    return [
        (part, part._copy_state_dict(), part._update_count, part._computed, part._forward_cache)
        for part in parts_of(metric)
    ]


def put_back(saved: Snapshot) -> None:
    """Let a metric have what it had when the snapshot was taken."""
    for part, states, count, computed, cache in saved:
        for name, value in states.items():
            setattr(part, name, [*value] if isinstance(value, list) else value)  # a reset empties lists in place
        part._update_count, part._computed, part._forward_cache = count, computed, cache


class StatesByLoader:
    """What metrics have collected in the loaders of an evaluation that are done, each for itself.

    One metric object may be logged from several loaders; it begins anew with each, and what it had stays here.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], Snapshot] = {}  # by the metric's id: a snapshot holds the metric

    def keep(self, metric: Metric, loader: int) -> None:
        """A loader is done: keep what the metric has collected, and let it begin anew."""
        if (id(metric), loader) not in self._saved:
            self._saved[id(metric), loader] = snapshot(metric)
            metric.reset()

    def show(self, metric: Metric, loaders: Iterable[int], name: str) -> None:
        """Let the metric have what it collected in some loaders together.

        Raises:
            MisconfigurationException: it cannot join what it collected.
        """
        metric.reset()
        found = [self._saved[id(metric), loader] for loader in loaders if (id(metric), loader) in self._saved]
        for number, saved in enumerate(found):
            if not number:
                put_back(saved)
                continue
            try:
                for part, states, count, _, _ in saved:
                    part.merge_state(states)
                    part._update_count += count - 1
            except (AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
                raise MisconfigurationException(
                    f"self.log({name!r}, <{type(metric).__name__}>, add_dataloader_idx=False) from several loaders "
                    "asks for one number over all, and this metric cannot join what it collected in each "
                    f"({error}): log it in the epoch's end hook, or one metric object a loader."
                ) from error

    def show_all(self, metric: Metric) -> None:
        """Let the metric have what it collected in all loaders; nothing where it cannot join that."""
        loaders = [loader for which, loader in self._saved if which == id(metric)]
        try:
            self.show(metric, loaders, type(metric).__name__)
        except MisconfigurationException:
            metric.reset()
        for part in parts_of(metric):
            part._computed = None  # a loader's own


@contextmanager
def lists_made_alike(strategy: Strategy) -> Iterator[None]:
    """While a call of the Trainer lasts: torchmetrics exchanges lists that are empty on some ranks, too.

    That goes for each metric that is computed over the ranks, by `self.log` or by the user's own `compute()`, in a
    module or in a callback: a rank without samples is the rule here, where no sample is repeated to fill it. Of the
    ranks that see the same samples one takes part.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        yield
        return
    with _lock:
        _sessions.append(strategy)
        if len(_sessions) == 1:
            _plain.append(torchmetrics.Metric._sync_dist)
            torchmetrics.Metric._sync_dist = _sync_dist
    try:
        yield
    finally:
        with _lock:
            _sessions.pop()
            if not _sessions:
                torchmetrics.Metric._sync_dist = _plain.pop()


_lock = threading.Lock()
_sessions: list[Strategy] = []
"""The strategies of Trainers' calls, of which one may be inside another."""
_plain: list[Callable[..., None]] = []


def _sync_dist(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Stands for `torchmetrics.Metric._sync_dist` while a call of the Trainer lasts."""
    own = sys.modules["torchmetrics.utilities.distributed"].gather_all_tensors
    if dist_sync_fn is None or dist_sync_fn is own:  # else the user's own exchange: it may need no process group
        group = process_group = process_group or metric.process_group or _sessions[-1].peers

        def gather_objects(mine: object) -> list[Any]:
            found = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(found, mine, group=group)
            return found

        fill_empty_lists(metric, gather_objects)
    _plain[0](metric, dist_sync_fn or own, process_group)


def fill_empty_lists(metric: Metric, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Before a metric is reduced over the ranks: let one that collected nothing in a list take part. Collective.

    torchmetrics sends one message for each tensor in a list, so that ranks whose lists are of other lengths would wait
    for each other, or be aborted by gloo.

    Args:
        metric: alike on all ranks.
        gather_objects: all_gather of a small Python object.

    Raises:
        MisconfigurationException: lists that are not joined to one tensor are of other lengths.
    """
    names = _lists(metric)
    if not names:
        return
    of_ranks = gather_objects([_described(getattr(metric, name)) for name in names])
    for name, each in zip(names, zip(*of_ranks, strict=True), strict=True):
        joined = getattr(metric._reductions[name], "__name__", "") == "dim_zero_cat"
        lengths = [length for length, _ in each]
        if not joined and len(set(lengths)) > 1:
            raise MisconfigurationException(
                f"{type(metric).__name__} keeps a list, {name!r}, that it does not join to one tensor (its "
                f"`dist_reduce_fx` is not 'cat'), and it has {lengths} entries by rank: the ranks cannot exchange "
                'them. Give the state dist_reduce_fx="cat", or evaluate on one device.'
            )
        example = next((kind for _, kind in each if kind is not None), None)
        value = getattr(metric, name)
        if joined and isinstance(value, list) and not value and example is not None:
            dtype, shape = example
            setattr(metric, name, [torch.zeros((0, *shape), dtype=dtype, device=metric.device)])


def _lists(metric: Metric) -> list[str]:
    return [name for name, default in metric._defaults.items() if isinstance(default, list)]


def _described(value: Any) -> tuple[int, Any]:
    """(length of a list, type and shape of a row in it)."""
    if isinstance(value, Tensor):
        value = [value]
    tensors = [item for item in value if isinstance(item, Tensor)]
    kind = (tensors[0].dtype, tuple(tensors[0].shape[1:])) if tensors else None
    return len(value), kind


def leave_inference_mode(module: nn.Module) -> None:
    """Let metrics and buffers be tensors that a later fit can change; those made in inference mode cannot be."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else _ordinary(buffer)
        for name in part._defaults if is_metric(part) else ():
            value = getattr(part, name)
            setattr(part, name, [*map(_ordinary, value)] if isinstance(value, list) else _ordinary(value))


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def find_metric(module: nn.Module, name: str) -> Metric | None:
    """The metric that a checkpoint names; None where the module has none.

    What tracks a metric over epochs (torchmetrics' `MetricTracker`) makes another one with each, and makes here those
    of the epochs that are over.
    """
    owner: Any = module
    for part in name.split("."):
        increment = getattr(owner, "increment", None)
        while callable(increment) and part.isdigit() and len(owner) <= int(part):
            increment()
        owner = owner._modules.get(part)
        if owner is None:
            return None
    return owner if is_metric(owner) else None


def load_metric(metric: Metric, saved: list[dict[str, Any]]) -> None:
    """A torchmetrics object's state, from one rank or from several whose states can be put together."""
    reductions = {key: getattr(reduce, "__name__", "") for key, reduce in metric._reductions.items()}
    if len(saved) > 1 and not set(reductions.values()) <= MERGES.keys():
        warn_once(
            f"{type(metric).__name__} has a state that cannot be put together from several ranks, and the run goes on "
            "with fewer: in the epoch that was under way it counts what comes from here on."
        )
        return
    for key in saved[0]["states"]:
        value = saved[0]["states"][key]
        for part in saved[1:]:
            more = part["states"][key]
            value = value + more if isinstance(value, list) else MERGES[reductions[key]](value, more)
        setattr(metric, key, _to(value, metric.device))
    metric._update_count, metric._computed = sum(part["count"] for part in saved), None


# by the names of torchmetrics' functions
MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda *tensors: torch.cat(tensors),
}


def _to(value: Any, device: torch.device) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
