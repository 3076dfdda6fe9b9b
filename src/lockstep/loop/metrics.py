"""States of torchmetrics objects: stored for each loader, restored, and reduced over the ranks."""

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

# for a metric and the metrics inside it: (metric, states, number of updates, last result, last forward's result)
Snapshot = list[tuple["Metric", dict[str, Any], int, Any, Any]]


def is_metric(value: object) -> TypeGuard[Metric]:
    """Return True if ``value`` is a torchmetrics object. Never imports torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def parts_of(metric: Metric) -> list[Metric]:
    """Return a metric and all metrics inside it, in the same order on all ranks."""
    return [part for part in metric.modules() if is_metric(part)]


def snapshot(metric: Metric) -> Snapshot:
    """Return the states of a metric and of the metrics inside it, for :func:`restore_states`."""
    return [
        (part, part._copy_state_dict(), part._update_count, part._computed, part._forward_cache)
        for part in parts_of(metric)
    ]


def restore_states(saved: Snapshot) -> None:
    """Restore the states that :func:`snapshot` returned."""
    for part, states, count, computed, cache in saved:
        for name, value in states.items():
            setattr(part, name, [*value] if isinstance(value, list) else value)  # `reset` empties lists in place
        part._update_count, part._computed, part._forward_cache = count, computed, cache


class StatesByLoader:
    """Storage for the states that metrics have after each loader of an evaluation with several loaders.

    A metric object may be logged from several loaders, and is reset after each loader.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], Snapshot] = {}  # by the metric's id; the snapshot keeps the metric alive

    def keep(self, metric: Metric, loader: int) -> None:
        """Store a metric's states at the end of a loader, and reset the metric."""
        if (id(metric), loader) not in self._saved:
            self._saved[id(metric), loader] = snapshot(metric)
            metric.reset()

    def show(self, metric: Metric, loaders: Iterable[int], name: str) -> None:
        """Merge the metric's states that were stored for ``loaders``, and load the result into the metric.

        Raises:
            MisconfigurationException: the metric cannot merge its states.
        """
        metric.reset()
        found = [self._saved[id(metric), loader] for loader in loaders if (id(metric), loader) in self._saved]
        for number, saved in enumerate(found):
            if not number:
                restore_states(saved)
                continue
            try:
                for part, states, count, _, _ in saved:
                    part.merge_state(states)
                    part._update_count += count - 1
            except (AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
                raise MisconfigurationException(
                    f"self.log({name!r}, <{type(metric).__name__}>, add_dataloader_idx=False) from several loaders: "
                    f"the metric cannot merge its states ({error}): log it in the epoch's end hook, or use a separate "
                    "metric object for each loader."
                ) from error

    def show_all(self, metric: Metric) -> None:
        """Load the merged states of all loaders into the metric. Reset the metric if it cannot merge states."""
        loaders = [loader for which, loader in self._saved if which == id(metric)]
        try:
            self.show(metric, loaders, type(metric).__name__)
        except MisconfigurationException:
            metric.reset()
        for part in parts_of(metric):
            part._computed = None  # it is a single loader's


@contextmanager
def fill_lists_in_call(strategy: Strategy) -> Iterator[None]:
    """Inside the ``with`` block, enable torchmetrics to gather list states that are empty on some ranks.

    This applies to each metric that is computed over the ranks, by `self.log` or by the user's own `compute()`.
    """
    # ranks without samples are common, since no sample is repeated to fill them
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        yield
        return
    with _lock:  # several Trainers may run in threads
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
"""Strategies of the running Trainer calls. A call may run inside another one."""
_plain: list[Callable[..., None]] = []


def _sync_dist(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Fill empty lists and synchronize a metric. Replaces `torchmetrics.Metric._sync_dist` during a Trainer call."""
    own = sys.modules["torchmetrics.utilities.distributed"].gather_all_tensors
    if dist_sync_fn is None or dist_sync_fn is own:  # a user's own exchange may need no process group
        # peers: one of the ranks with the same samples takes part
        group = process_group = process_group or metric.process_group or _sessions[-1].peers

        def gather_objects(mine: object) -> list[Any]:
            found = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(found, mine, group=group)
            return found

        fill_empty_lists(metric, gather_objects)
    _plain[0](metric, dist_sync_fn or own, process_group)


def fill_empty_lists(metric: Metric, gather_objects: Callable[[Any], list[Any]]) -> None:
    """Fill empty list states of a metric with empty tensors, so that the ranks can gather them. Collective.

    torchmetrics sends one message for each tensor in a list. With lists of different lengths the ranks would wait for
    each other forever, or gloo would abort them.

    Args:
        metric: a metric that all ranks have.
        gather_objects: all_gather of a small Python object.

    Raises:
        MisconfigurationException: lists that are not concatenated to one tensor have different lengths.
    """
    names = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    if not names:
        return
    of_ranks = gather_objects([_describe_list(getattr(metric, name)) for name in names])
    for name, each in zip(names, zip(*of_ranks, strict=True), strict=True):
        joined = getattr(metric._reductions[name], "__name__", "") == "dim_zero_cat"
        lengths = [length for length, _ in each]
        if not joined and len(set(lengths)) > 1:
            raise MisconfigurationException(
                f"{type(metric).__name__} has a list state {name!r} with {lengths} entries on the ranks and without "
                'dist_reduce_fx="cat", so the ranks cannot gather it: add the state with dist_reduce_fx="cat", or '
                "evaluate on one device."
            )
        example = next((kind for _, kind in each if kind is not None), None)
        value = getattr(metric, name)
        if joined and isinstance(value, list) and not value and example is not None:
            dtype, shape = example
            # no rows, in the shape of the others' rows: torchmetrics then sends a tensor from every rank
            setattr(metric, name, [torch.zeros((0, *shape), dtype=dtype, device=metric.device)])


def _describe_list(value: Any) -> tuple[int, Any]:
    """Return (length of a list, (dtype, row shape) of its first tensor). The second item is None without a tensor."""
    if isinstance(value, Tensor):
        value = [value]
    tensors = [item for item in value if isinstance(item, Tensor)]
    kind = (tensors[0].dtype, tuple(tensors[0].shape[1:])) if tensors else None
    return len(value), kind


def leave_inference_mode(module: nn.Module) -> None:
    """Replace inference tensors in metrics and buffers by normal copies, which a later fit can modify."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else _plain_tensor(buffer)
        for name in part._defaults if is_metric(part) else ():
            value = getattr(part, name)
            setattr(part, name, [*map(_plain_tensor, value)] if isinstance(value, list) else _plain_tensor(value))


def _plain_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def find_metric(module: nn.Module, name: str) -> Metric | None:
    """Return the module's metric with this name, or None.

    torchmetrics' `MetricTracker` adds a copy of its metric in each epoch; missing copies for past epochs are created.
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
    """Load saved states into a torchmetrics object: that of one rank, or the merged states of several ranks."""
    reductions = {key: getattr(reduce, "__name__", "") for key, reduce in metric._reductions.items()}
    if len(saved) > 1 and not set(reductions.values()) <= MERGES.keys():
        warn_once(
            f"{type(metric).__name__} has a state that cannot be merged from several ranks, but the run resumes with "
            "fewer ranks: in the current epoch, the metric only counts batches after the resume."
        )
        return
    for key in saved[0]["states"]:
        value = saved[0]["states"][key]
        for part in saved[1:]:
            more = part["states"][key]
            value = value + more if isinstance(value, list) else MERGES[reductions[key]](value, more)
        device = metric.device
        setattr(metric, key, [item.to(device) for item in value] if isinstance(value, list) else value.to(device))
    metric._update_count, metric._computed = sum(part["count"] for part in saved), None


# by name of torchmetrics' functions
MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda *tensors: torch.cat(tensors),
}
