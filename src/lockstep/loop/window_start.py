"""State that a window's micro-batches change besides gradients, as it was before the first of them.

A run that resumes within a window and cannot take its gradients over plays the window again. It starts from what is
kept here, so that nothing counts twice.
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
"""``states`` by name, and the ``count`` of updates."""


def metric_state(metric: Metric) -> MetricState:
    """Return the states of a torchmetrics object. Lists are copied, their tensors are shared."""
    states: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        states[name] = value.detach().clone() if isinstance(value, Tensor) else list(value)
    return {"states": states, "count": metric._update_count}


def initial_state(metric: Metric) -> MetricState:
    """Return the state of a torchmetrics object after a reset."""
    states = metric._defaults.items()
    return {"states": {name: list(v) if isinstance(v, list) else v.detach().clone() for name, v in states}, "count": 0}


SMALL = 1 << 16
"""Elements of a buffer, at most, that may change without a new version, as torch's batch norm changes its own."""


@dataclass
class _Buffer:
    """A buffer as it was."""

    layer: dict[str, Tensor | None]
    """The buffers of its layer, which may put another one in its place."""
    key: str
    source: Tensor
    version: int | None
    """None: it may have changed at any time."""
    value: Tensor

    def fits(self, buffer: Tensor) -> bool:
        """Return True if a buffer can be copied into the memory of ``value``."""
        return self.value.shape == buffer.shape and self.value.dtype == buffer.dtype

    def unchanged(self) -> bool:
        """Return True if the buffer is certain to be unchanged."""
        now = self.layer.get(self.key)
        return now is self.source and self.version is not None and _version(now) == self.version


def _version(tensor: Tensor) -> int | None:
    return None if tensor.numel() <= SMALL or tensor.is_inference() else tensor._version


class WindowStart:
    """State at the start of the current window, of a fit whose windows have several micro-batches.

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
        """Find the layers of the module that have buffers or are metrics.

        Args:
            module: of the fit.
            results: collector of training.
            published: values that callbacks read.
        """
        # once an epoch: a walk over all modules takes longer than a small step
        self._results, self._published = results, published
        self._parts = [(name, part) for name, part in module.named_modules() if part._buffers or is_metric(part)]

    @torch.no_grad()
    def note(self, batch: int) -> None:
        """Note the start of a window, after ``batch`` micro-batches of the epoch."""
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
        """Yield (kept, current) for each buffer of a layer that may have changed. Keep a new one at once."""
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
        """Take over the :meth:`state` of an earlier attempt, within whose window the run continues."""
        self._read = state

    def state(self, batch: int, with_buffers: bool = True) -> dict[str, Any] | None:
        """Return the kept state for a checkpoint; None if no window has started there.

        Args:
            batch: micro-batches of the epoch that were done when the window started.
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
    """Set buffers to the values of :meth:`WindowStart.state`."""
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)
