"""Data parallel strategy in one process, which splits the loader's batch over devices and runs the parts in threads."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engines.strategy import Strategy
from lockstep.extensions.parallel.dp.replicas import gather, in_threads, join, part_sizes, replicate, rows_of, scatter
from lockstep.ground.comm import reduction_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.transfer import has_pinned_memory, move_data_to_device
from lockstep.module import LightningModule


class DataParallelStrategy(Strategy):
    """Strategy that uses one process for all devices of a node; ``batch_size`` is the total over the devices.

    Each step method runs once for each device, on a replica of the module and a part of the batch. The loss and
    logged values are means over the parts, weighted by their rows, so that they are those of one device with the
    whole batch. Metrics of torchmetrics are shared by the replicas, which use them one after the other.

    The first part runs on the module itself, so attributes that its step sets are kept; those that other parts set
    are lost. "ddp" is faster: here one interpreter drives all devices, and weights are copied in every step.
    """

    drives_all_devices = True

    def setup_environment(self) -> None:
        """Raise an error if there are several nodes, then set up the environment as other strategies do."""
        if self.world.num_nodes > 1:
            raise MisconfigurationException(
                f'Trainer(strategy="dp", num_nodes={self.world.num_nodes}): "dp" runs one process that uses the '
                'devices of one node. Use strategy="ddp".'
            )
        super().setup_environment()

    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Set up the module on the first device. Each step creates the replicas."""
        if not module.automatic_optimization:
            raise MisconfigurationException(
                'Trainer(strategy="dp") with `automatic_optimization = False`: `training_step` runs on all devices at '
                'the same time, so it cannot step optimizers. Use strategy="ddp".'
            )
        super().setup_module(module, own_backward)

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Run a step method on all devices, and join outputs and logged values on the first device."""
        rows = rows_of(args[0])
        if rows is None or len(self.devices) == 1 or getattr(fn, "__self__", None) is not self.module:
            return super().run(fn, *args)
        sizes = part_sizes(rows, len(self.devices))
        parts = scatter(args[0], self.devices)
        turn = threading.RLock()
        shared_metrics: dict[int, Any] = {}

        def shared(module: nn.Module) -> Any:
            if not _is_metric(module):
                return None
            return shared_metrics.setdefault(id(module), _SharedMetric(module, turn))

        module = self.module
        assert module is not None
        replicas = replicate(module, self.devices[: len(parts)], shared)
        logs: list[dict[str, _LoggedInPart]] = [{} for _ in parts]
        own_metrics = _share_metrics(module, shared)
        try:
            # threads must not log into the Trainer at the same time, and the mean needs all parts
            for replica, log in zip(replicas, logs, strict=True):
                replica.__dict__["log"] = _collect(log)
            method = fn.__func__  # type: ignore[attr-defined]
            calls = [partial(method, replica, part, *args[1:]) for replica, part in zip(replicas, parts, strict=True)]
            outputs = super().run(in_threads, calls, self.devices)
        finally:
            module.__dict__.pop("log", None)
            for place, name, metric in own_metrics:
                place[name] = metric
        for name, logged in _merge(logs, sizes, self.root_device).items():
            module.log(name, logged.value, **logged.options)
        return self._output(fn.__name__, outputs, sizes)

    def _output(self, name: str, outputs: list[Any], sizes: list[int]) -> Any:
        # a part whose step returned None does not count
        kept = [(output, size) for output, size in zip(outputs, sizes, strict=True) if output is not None]
        outputs, sizes = [list(each) for each in zip(*kept, strict=True)] or [[None], [1]]
        if name == "predict_step":
            return gather(outputs, self.root_device)
        first = outputs[0]
        if isinstance(first, dict) and "weight" in first and name == "training_step":
            weights = [float(output["weight"]) for output in outputs]
            joined = self._joined([{k: v for k, v in output.items() if k != "weight"} for output in outputs], weights)
            return {**joined, "weight": sum(output["weight"] for output in outputs)}
        return self._joined(outputs, [float(size) for size in sizes])

    def _joined(self, outputs: list[Any], weights: list[float]) -> Any:
        def together(tensors: list[Tensor]) -> Tensor:
            there = [tensor.to(self.root_device) for tensor in tensors]
            return torch.cat(there) if there[0].ndim else _mean(there, weights)

        return join(outputs, together)


class _LoggedInPart:
    """Value and keyword options of a call to ``self.log`` while a replica runs its part of the batch."""

    def __init__(self, value: object, options: dict[str, Any]) -> None:
        self.value, self.options = value, options


class _SharedMetric:
    """Wrapper around a metric that all replicas share. It moves tensors to the metric's device and locks each call."""

    def __init__(self, metric: Any, turn: AbstractContextManager[object]) -> None:
        self.metric, self._turn = metric, turn

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._use(self.metric, args, kwargs)

    def update(self, *args: object, **kwargs: object) -> Any:
        return self._use(self.metric.update, args, kwargs)

    def _use(self, method: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        args, kwargs = move_data_to_device((args, kwargs), self.metric.device)
        with self._turn:
            return method(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.metric, name)


def _is_metric(module: object) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(module, torchmetrics.Metric)


def _share_metrics(module: nn.Module, shared: Callable[[Any], Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Replace the module's metrics with ``shared(metric)``. Return a list of (container, name, original metric)."""
    changed = []
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and _is_metric(child):
                changed.append((part._modules, name, child))
    for place, name, metric in changed:
        place[name] = shared(metric)
    return changed


_OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]
"""Arguments of ``log`` after the name and the value."""


def _collect(log: dict[str, _LoggedInPart]) -> Callable[..., None]:
    def collect(name: str, value: object, *args: object, **kwargs: object) -> None:
        log[name] = _LoggedInPart(value, {**dict(zip(_OPTIONS, args, strict=False)), **kwargs})

    return collect


def _mean(values: list[Tensor], weights: list[float]) -> Tensor:
    total = sum(weights)
    if not total:
        return torch.stack(values).sum() * 0.0
    if not values[0].is_floating_point() and not values[0].is_complex():
        values = [value.double() for value in values]
    return torch.stack([value * (weight / total) for value, weight in zip(values, weights, strict=True)]).sum()


def _merge(logs: list[dict[str, _LoggedInPart]], sizes: list[int], device: torch.device) -> dict[str, _LoggedInPart]:
    """Merge the logged values of the parts by name, in the order in which they were first logged.

    Values are on ``device``.
    """
    # nothing is copied to the host, which would wait for the forward and start the backward late
    merged: dict[str, _LoggedInPart] = {}
    for name in dict.fromkeys(name for log in logs for name in log):
        found = [(log[name], size) for log, size in zip(logs, sizes, strict=True) if name in log]
        entry = found[0][0]
        if isinstance(entry.value, _SharedMetric):
            merged[name] = _LoggedInPart(entry.value.metric, entry.options)
            continue
        if _is_metric(entry.value):
            merged[name] = entry
            continue
        weights = [float(logged.options.get("batch_size") or size) for logged, size in found]
        values = [
            torch.as_tensor(logged.value).detach().to(device, non_blocking=has_pinned_memory(device.type))
            for logged, _ in found
        ]
        options = dict(entry.options)
        how = reduction_of(name, options.get("reduce_fx", "mean"))
        if how == "mean":
            value = _mean(values, weights)
            if options.get("batch_size") is not None:
                options["batch_size"] = int(sum(weights))
        else:
            value = getattr(torch.stack(values), how)()
        merged[name] = _LoggedInPart(value, options)
    return merged
