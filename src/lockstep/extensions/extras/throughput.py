"""Meter of throughput, and functions that count a model's operations and return a device's peak performance."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.ground.chips import CHIPS, TERA, TFLOAT32
from lockstep.ground.device import device_name
from lockstep.ground.rank import rank_zero_warn

# -- floating-point operations -------------------------------------------------------------------------------


def measure_flops(
    model: torch.nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Return the number of floating-point operations of a forward pass; with ``loss_fn`` also of the backward.

    The model may be on the "meta" device; nothing is computed then.

    Args:
        model: the model that ``forward_fn`` runs.
        forward_fn: runs the model's forward once and returns its result.
        loss_fn: makes a scalar of the forward's result; if given, the backward is run and counted too.

    Returns:
        The number of operations, as ``torch.utils.flop_counter`` counts them (matrix products, convolutions,
        attention; an addition and a multiplication are two).

    Example::

        with torch.device("meta"):
            model, x = MyModel(), torch.randn(32, 3, 224, 224)
        training = measure_flops(model, lambda: model(x), lambda y: y.sum())
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        outputs = forward_fn()
        if loss_fn is not None:
            loss_fn(outputs).backward()
    return int(counter.get_total_flops())


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return a device's peak number of operations per second, for large dense matrix products.

    Args:
        device: a CUDA device; for others the peak is unknown.
        dtype: dtype of the matrices. ``torch.float32`` means TF32 if the device supports it and
            ``torch.set_float32_matmul_precision`` allows it.

    Returns:
        Operations per second; None (with a warning on CUDA devices) if the device or its dtype is unknown.
    """
    if device.type != "cuda":
        return None
    name = device_name(device)
    rows = (row for pattern, row in CHIPS if re.search(pattern, name.lower()))
    table = None if "mig" in name.lower() else next(rows, None)
    matmul = torch.get_float32_matmul_precision()
    key = TFLOAT32 if table and dtype is torch.float32 and matmul != "highest" and TFLOAT32 in table else dtype
    if table is None or key not in table:
        rank_zero_warn(
            f"The peak operations per second of {name!r} in {dtype} are not known, so no MFU is computed. Pass "
            "available_flops= to compute it."
        )
        return None
    return int(table[key] * TERA)


# -- throughput ----------------------------------------------------------------------------------------------


class _Rising:
    """Recorder of a counter's newest values. Each value must exceed the previous one."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.values: deque[float] = deque(maxlen=size)

    def check(self, value: float) -> None:
        if self.values and value <= self.values[-1]:
            raise ValueError(
                f"Throughput.update({self.name}={value}): the value must exceed the previous one, {self.values[-1]}, "
                "since it is the total so far."
            )

    def increase(self) -> float:
        return self.values[-1] - self.values[0]


class Throughput:
    """Meter of batches, samples, items and floating-point operations per second.

    Rates are taken between the oldest and the newest of the last ``window_size`` updates, once the window is full.
    :meth:`compute` returns

    - ``time``, ``batches``, ``samples``, ``lengths``: the totals;
    - ``device/batches_per_sec``, ``device/samples_per_sec``, ``device/items_per_sec``: per second on this device;
    - ``device/flops_per_sec``: operations per second on this device, and ``device/mfu``, its fraction of
      ``available_flops``;
    - with several devices ``batches_per_sec``, ``samples_per_sec``, ``items_per_sec``, ``flops_per_sec``: of all
      devices, assuming that they are as fast as this one.

    Args:
        available_flops: peak operations per second of a device; see
            :func:`~lockstep.utilities.throughput.get_available_flops`.
        world_size: number of devices.
        window_size: number of updates over which rates are taken, at least 2.
        separator: separates ``device`` from the name.

    Raises:
        ValueError: ``world_size`` is below 1 or ``window_size`` below 2.

    Example::

        throughput, start = Throughput(window_size=50), time.perf_counter()
        for i, batch in enumerate(loader, start=1):
            train(batch)  # on a GPU: torch.accelerator.synchronize() after it
            throughput.update(time=time.perf_counter() - start, batches=i, samples=i * 32)
        print(throughput.compute())
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if world_size < 1:
            raise ValueError(f"Throughput(world_size={world_size}): the number of devices must be at least 1.")
        if window_size < 2:
            raise ValueError(f"Throughput(window_size={window_size}): a rate needs at least 2 updates.")
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._time = _Rising("time", window_size)
        self._batches = _Rising("batches", window_size)
        self._samples = _Rising("samples", window_size)
        self._lengths = _Rising("lengths", window_size)
        self._flops: deque[float] = deque(maxlen=window_size)

    @property
    def seconds(self) -> float:
        """Time of the newest update, in seconds since the start; 0 before the first update."""
        return self._time.values[-1] if self._time.values else 0.0

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Record the totals so far; an invalid update raises an error and is not recorded.

        Args:
            time: seconds since the start.
            batches: batches of this device since the start.
            samples: samples of this device since the start.
            lengths: items of this device's samples (such as tokens) since the start; in every update or in none.
            flops: operations of this device since the last update.

        Raises:
            ValueError: a total does not rise, there are fewer samples than batches or fewer items than samples, or
                ``lengths`` was missing in an earlier update.
        """
        if samples < batches or (lengths is not None and lengths < samples):
            raise ValueError(
                f"Throughput.update({batches=}, {samples=}, {lengths=}): samples is less than batches, or lengths "
                "is less than samples. Pass totals since the start."
            )
        if lengths is not None and len(self._lengths.values) != len(self._samples.values):
            raise ValueError("Throughput.update(lengths=...): pass `lengths` in every update or in none.")
        given = [(self._time, time), (self._batches, batches), (self._samples, samples), (self._lengths, lengths)]
        totals = [(counter, value) for counter, value in given if value is not None]
        # All are checked before any is recorded, so that a refused update changes nothing.
        for counter, value in totals:
            counter.check(value)
        for counter, value in totals:
            counter.values.append(value)
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, int | float]:
        """Return the metrics by name; an empty dict before the first update."""
        if not self._time.values:
            return {}
        counters = (self._time, self._batches, self._samples, self._lengths)
        metrics: dict[str, int | float] = {each.name: each.values[-1] for each in counters if each.values}
        if len(self._time.values) < (self._time.values.maxlen or 0):
            return metrics
        elapsed = self._time.increase()
        rates = {
            "batches_per_sec": self._batches.increase() / elapsed,
            "samples_per_sec": self._samples.increase() / elapsed,
        }
        if len(self._lengths.values) == self._lengths.values.maxlen:
            rates["items_per_sec"] = self._lengths.increase() / elapsed
        if len(self._flops) == self._flops.maxlen:
            # operations up to the oldest update are before the window
            rates["flops_per_sec"] = (sum(self._flops) - self._flops[0]) / elapsed
        for name, rate in rates.items():
            metrics[f"device{self.separator}{name}"] = rate
            if self.world_size > 1:
                metrics[name] = rate * self.world_size
        if "flops_per_sec" in rates and self.available_flops:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def reset(self) -> None:
        """Drop all recorded updates."""
        for counter in (self._time, self._batches, self._samples, self._lengths):
            counter.values.clear()
        self._flops.clear()
