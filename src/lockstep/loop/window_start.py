"""WindowStart, a copy of the state that an accumulation window's micro-batches change in addition to gradients.

A run that resumes within a window but cannot load the window's gradients repeats the window. It starts from this copy,
so that nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep.loop.logging import LogCollector, LogSnapshot
from lockstep.loop.metrics import is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

MetricState = dict[str, Any]
"""A metric's "states" by name, and the "count" of updates."""


def metric_state(metric: Metric) -> MetricState:
    """Copy the states of a torchmetrics object. Tensors inside lists are shared with the object."""
    states: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        states[name] = value.detach().clone() if isinstance(value, Tensor) else list(value)
    return {"states": states, "count": metric._update_count}


def initial_state(metric: Metric) -> MetricState:
    """Return the state that a torchmetrics object has after a reset."""
    states = metric._defaults.items()
    return {"states": {name: list(v) if isinstance(v, list) else v.detach().clone() for name, v in states}, "count": 0}


SMALL = 1 << 16
"""Number of elements up to which a buffer is always copied, because batch norm does not raise its version."""


@dataclass
class _Buffer:
    """Copy of a buffer at the start of a window."""

    layer: dict[str, Tensor | None]
    """All buffers of the layer, in which the layer may replace this buffer."""
    key: str
    source: Tensor
    version: int | None
    """The tensor's version; None: the version does not show changes."""
    value: Tensor

    def fits(self, buffer: Tensor) -> bool:
        """Return True if the copy can store the values of ``buffer``, because both have the same shape and dtype."""
        return self.value.shape == buffer.shape and self.value.dtype == buffer.dtype

    def unchanged(self) -> bool:
        """Return True if the buffer is certain to be unchanged."""
        now = self.layer.get(self.key)
        return now is self.source and self.version is not None and _version(now) == self.version


def _version(tensor: Tensor) -> int | None:
    return None if tensor.numel() <= SMALL or tensor.is_inference() else tensor._version


class WindowStart:
    """Copy of the state at the start of the current accumulation window, if it has several micro-batches.

    Example:
        >>> start.begin_epoch(module, results, published)
        >>> start.note(batch=4)  # before a window
        >>> start.state(batch=4)  # within it
    """

    def __init__(self) -> None:
        self._results: LogCollector | None = None
        self._published: dict[str, Tensor] = {}
        self._batch = -1
        self._read: dict[str, Any] | None = None  # of a checkpoint, until the next window
        self._entries: LogSnapshot = {}
        self._shown: dict[str, Tensor] = {}
        self._metrics: dict[str, MetricState] = {}
        self._buffers: dict[tuple[str, str], _Buffer] = {}
        self._parts: list[tuple[str, nn.Module]] = []

    def __reduce__(self) -> tuple[type[WindowStart], tuple[()]]:
        return WindowStart, ()  # a copy does not belong to the running fit

    def begin_epoch(self, module: nn.Module, results: LogCollector, published: dict[str, Tensor]) -> None:
        """Prepare for an epoch: list the layers that have buffers or are metrics.

        Args:
            module: module of the fit.
            results: collector of logged values in training.
            published: ``trainer.callback_metrics``.
        """
        # once an epoch: a walk over all modules takes longer than a small step
        self._results, self._published = results, published
        self._parts = [(name, part) for name, part in module.named_modules() if part._buffers or is_metric(part)]

    @torch.no_grad()
    def note(self, batch: int) -> None:
        """Copy the state at the start of a window, after ``batch`` micro-batches of the epoch."""
        self._batch, self._read = batch, None
        assert self._results is not None
        self._entries = self._results.snapshot()
        self._shown = dict(self._published)
        changed: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, part in self._parts:
            if is_metric(part):
                kept = self._metrics.get(name)
                if kept is None or kept["count"] != part._update_count:
                    self._metrics[name] = metric_state(part)
                continue
            for before, now in self._changed_of(name, part):
                # torch's foreach functions take lists of one device and dtype
                targets, sources = changed.setdefault((now.device, now.dtype), ([], []))
                targets.append(before)
                sources.append(now)
        for targets, sources in changed.values():
            torch._foreach_copy_(targets, sources)  # one kernel on a GPU

    def _changed_of(self, prefix: str, part: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (copy, buffer) for each buffer that may have changed; a buffer without a copy is copied at once."""
        for key, buffer in part._buffers.items():
            if buffer is None:
                continue
            kept = self._buffers.get((prefix, key))
            if kept is not None and kept.value.device != buffer.device:
                kept = None  # a block has moved
            if kept is not None and buffer is kept.source and kept.version is None:
                yield kept.value, buffer  # the usual one, as cheap as can be
            elif key not in part._non_persistent_buffers_set and not is_lazy(buffer):
                if kept is None or not kept.fits(buffer):
                    self._buffers[prefix, key] = _Buffer(
                        part._buffers, key, buffer, _version(buffer), buffer.detach().clone()
                    )
                elif not kept.unchanged():
                    kept.source, kept.version = buffer, _version(buffer)
                    yield kept.value, buffer

    def take(self, state: dict[str, Any] | None) -> None:
        """Until the next window starts, use a :meth:`state` from a checkpoint in place of the copy."""
        self._read = state

    def state(self, batch: int, with_buffers: bool = True) -> dict[str, Any] | None:
        """Return the copied state for a checkpoint; None unless the current window starts after ``batch`` batches.

        Args:
            batch: number of micro-batches in the epoch before the window.
            with_buffers: include buffers.
        """
        if self._read is not None:
            return self._read
        if self._results is None or batch != self._batch:
            return None
        # the collector writes states of its current values only, so it goes back to the start for a moment
        now = self._results.snapshot()
        self._results.go_back(self._entries)
        logged = deepcopy(self._results.state_dict())
        self._results.go_back(now)
        return {
            "results": logged,
            "metrics": deepcopy(self._metrics),
            "published": {name: value.cpu() for name, value in self._shown.items()},
            "buffers": dict(self._changed()) if with_buffers else {},
        }

    def _changed(self) -> Iterator[tuple[str, Tensor]]:
        for (prefix, key), kept in self._buffers.items():
            now = kept.layer.get(kept.key)
            if not kept.unchanged() and (now is None or not torch.equal(now, kept.value)):
                yield f"{prefix}.{key}" if prefix else key, kept.value.cpu().clone()


@torch.no_grad()
def put_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy saved buffers, which are part of a :meth:`WindowStart.state`, into the module's buffers."""
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)
