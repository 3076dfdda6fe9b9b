"""States of torchmetrics objects: kept by loader, put back, and made ready for the reduction over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException

# of a metric and the metrics inside it: (metric, states, updates, last result, last forward's result)
Snapshot = list[tuple[Any, dict[str, Any], int, Any, Any]]


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics object (never imports torchmetrics: who has one has imported it)."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def parts_of(metric: Any) -> list[Any]:
    """The metric and those inside it, in one order on all ranks."""
    return [part for part in metric.modules() if is_metric(part)]


def snapshot(metric: Any) -> Snapshot:
    """What a metric has collected."""
    return [
        (part, part._copy_state_dict(), part._update_count, part._computed, part._forward_cache)
        for part in parts_of(metric)
    ]


def put_back(saved: Snapshot) -> None:
    """Let a metric have what it had when the snapshot was taken."""
    for part, states, count, computed, cache in saved:
        for name, value in states.items():
            setattr(part, name, value)
        part._update_count, part._computed, part._forward_cache = count, computed, cache


class StatesByLoader:
    """What metrics have collected in the loaders of an evaluation that are done, each for itself.

    One metric object may be logged from several loaders; it begins anew with each, and what it had stays here.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], Snapshot] = {}
        self._metrics: dict[int, Any] = {}

    def keep(self, metric: Any, loader: int) -> None:
        """A loader is done: keep what the metric has collected, and let it begin anew."""
        if (id(metric), loader) not in self._saved:
            self._saved[id(metric), loader] = snapshot(metric)
            self._metrics[id(metric)] = metric
            metric.reset()

    def show(self, metric: Any, loaders: Iterable[int], name: str) -> None:
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


def fill_empty_lists(metric: Any, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Before a metric is reduced over the ranks: let one that collected nothing in a list take part. Collective.

    torchmetrics sends one message for each tensor in a list, so that ranks whose lists are of other lengths would wait
    for each other, or be aborted by gloo.

    Args:
        metric: alike on all ranks.
        gather_objects: all_gather of a small Python object.

    Raises:
        MisconfigurationException: lists that are not joined to one tensor are of other lengths.
    """
    parts = [part for part in parts_of(metric) if _is_reduced(part) and _lists(part)]
    if not parts:
        return
    mine = [[_described(getattr(part, name)) for name in _lists(part)] for part in parts]
    for part, of_ranks in zip(parts, zip(*gather_objects(mine), strict=True), strict=True):
        for name, each in zip(_lists(part), zip(*of_ranks, strict=True), strict=True):
            joined = getattr(part._reductions[name], "__name__", "") == "dim_zero_cat"
            lengths = [length for length, _ in each]
            if not joined and len(set(lengths)) > 1:
                raise MisconfigurationException(
                    f"{type(part).__name__} keeps a list, {name!r}, that it does not join to one tensor (its "
                    f"`dist_reduce_fx` is not 'cat'), and it has {lengths} entries by rank: the ranks cannot exchange "
                    'them. Give the state dist_reduce_fx="cat", or evaluate on one device.'
                )
            example = next((kind for _, kind in each if kind is not None), None)
            value = getattr(part, name)
            if joined and isinstance(value, list) and not value and example is not None:
                dtype, shape = example
                setattr(part, name, [torch.zeros((0, *shape), dtype=dtype, device=part.device)])


def _is_reduced(metric: Any) -> bool:
    own = type(metric)._sync_dist is not sys.modules["torchmetrics"].Metric._sync_dist
    return bool(getattr(metric, "sync_on_compute", True)) and not own


def _lists(metric: Any) -> list[str]:
    return [name for name, default in metric._defaults.items() if isinstance(default, list)]


def _described(value: Any) -> tuple[int, Any]:
    """(length of a list, type and shape of a row in it)."""
    if isinstance(value, Tensor):
        value = [value]
    tensors = [item for item in value if isinstance(item, Tensor)]
    kind = (tensors[0].dtype, tuple(tensors[0].shape[1:])) if tensors else None
    return len(value), kind
