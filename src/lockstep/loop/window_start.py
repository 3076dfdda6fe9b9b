"""What the micro-batches of a window change besides gradients, as it was before the first of them.

A run that resumes within a window and cannot take its gradients over plays the window again. It begins with what is
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

from lockstep.loop.logging import Entry, LogCollector
from lockstep.loop.metrics import is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

MetricState = dict[str, Any]
"""``states`` by name, and the ``count`` of updates."""


def metric_state(metric: Metric) -> MetricState:
    """What a torchmetrics object has collected. Lists are copied, their tensors are not: nobody changes them."""
    states: dict[str, Any] = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        states[name] = value.detach().clone() if isinstance(value, Tensor) else list(value)
    return {"states": states, "count": metric._update_count}


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
    value: Tensor

    def unchanged(self) -> bool:
        """Whether it is certain that it is still what it was."""
        if self.version is None or self.layer.get(self.key) is not self.source:
            return False
        return self.value.numel() > SMALL and _version(self.source) == self.version


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class WindowStart:
    """The beginning of the window under way, of a fit whose windows have several micro-batches.

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
        self._entries: list[tuple[Entry, tuple[Any, ...]]] = []
        self._shown: dict[str, Tensor] = {}
        self._metrics: dict[str, MetricState] = {}
        self._buffers: dict[str, _Buffer] = {}
        self._parts: list[tuple[str, nn.Module]] = []

    def __reduce__(self) -> tuple[type[WindowStart], tuple[()]]:
        return WindowStart, ()  # it is bound to the fit that runs

    def begin_epoch(self, module: nn.Module, results: LogCollector, published: dict[str, Tensor]) -> None:
        """Look which layers the module has, and from where its values are read.

        Args:
            module: of the fit.
            results: what training logs into.
            published: what callbacks read.
        """
        self._results, self._published = results, published
        self._parts = [(name, part) for name, part in module.named_modules() if part._buffers or is_metric(part)]

    def note(self, batch: int) -> None:
        """A window begins after so many micro-batches of the epoch."""
        self._batch, self._read = batch, None
        assert self._results is not None
        self._entries = self._results.snapshot()
        self._shown = dict(self._published)
        for name, part in self._parts:
            if is_metric(part):
                kept = self._metrics.get(name)
                if kept is None or kept["count"] != part._update_count:
                    self._metrics[name] = metric_state(part)
            elif part._buffers:
                self._keep_buffers(name, part)

    def _keep_buffers(self, prefix: str, part: nn.Module) -> None:
        for key, buffer in part._buffers.items():
            if buffer is None or is_lazy(buffer) or key in part._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{key}" if prefix else key
            kept = self._buffers.get(name)
            if kept is not None and kept.unchanged():
                continue
            version, value = _version(buffer), buffer.detach()
            if kept is not None and kept.value.shape == value.shape and kept.value.dtype == value.dtype:
                kept.value.copy_(value)
                kept.source, kept.version = buffer, version
            else:
                self._buffers[name] = _Buffer(part._buffers, key, buffer, version, value.clone())

    def take(self, state: dict[str, Any] | None) -> None:
        """A run goes on within a window whose beginning :meth:`state` of an earlier life told."""
        self._read = state

    def state(self, batch: int, with_buffers: bool = True) -> dict[str, Any] | None:
        """For a checkpoint; None where no window has begun there.

        Args:
            batch: micro-batches of the epoch that were done when the window began.
            with_buffers: tell of buffers, too.
        """
        if self._read is not None:
            return self._read
        if self._results is None or batch != self._batch:
            return None
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
        for name, kept in self._buffers.items():
            now = kept.layer.get(kept.key)
            if not kept.unchanged() and (now is None or not torch.equal(now, kept.value)):
                yield name, kept.value.detach().cpu().clone()


@torch.no_grad()
def put_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Let buffers have the values of :meth:`WindowStart.state`."""
    buffers = dict(module.named_buffers())
    for name, value in saved.items():
        buffers[name].copy_(value)
