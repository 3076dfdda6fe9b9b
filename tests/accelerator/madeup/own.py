"""Operators that the made-up device has of its own: making tensors, copies between devices, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.accelerator.madeup.kernels import OVERRIDABLE, Known, kernel, run
from tests.accelerator.madeup.memory import CPU, is_pinned, on_device, on_host, on_it, pinned, place
from tests.accelerator.madeup.queues import Lane, Mark, count_wait, lane_of, number
from tests.accelerator.madeup.settings import settings

_aten = torch.ops.aten


def empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    """``aten::empty.memory_format``."""
    host = _aten.empty.memory_format(size, dtype=dtype, device=torch.device("cpu"), memory_format=memory_format)
    return on_device(host, number(device))


def empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """``aten::empty_strided``."""
    host = _aten.empty_strided.default(size, stride, dtype=dtype, device=torch.device("cpu"))
    return on_device(host, number(device))


def resize_(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    """``aten::resize_``."""
    shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage = tensor.untyped_storage()
    if shape.numel() > storage.nbytes() // tensor.element_size() - tensor.storage_offset():
        made = empty([shape.numel()], tensor.dtype, device=tensor.device)
        if tensor.numel():
            made[: tensor.numel()].copy_(tensor.reshape(-1))
        place(tensor, made)
        storage = made.untyped_storage()
    set_ = _aten.set_.source_Storage_storage_offset
    set_._op_dk(CPU, tensor, storage, tensor.storage_offset(), shape.size(), shape.stride())
    return tensor


def copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::_copy_from``: between devices. As with CUDA the host waits, unless it says that it will not.

    It does not wait for a copy to the device if it says ``non_blocking``, nor for one to the CPU's pinned memory; what
    is in pinned memory is read or written when the device's stream comes to it.
    """
    if source is to:
        return to
    if on_it(source) and on_it(to):
        return _across(source, to)
    up = on_it(to)
    lane = lane_of((to if up else source).device.index)
    there, here = (on_host(to), source) if up else (to, on_host(source))
    host = source if up else to
    if not non_blocking or not (up or is_pinned(to)):
        count_wait("copy to the device" if up else "copy to the cpu")
        lane.drain()
    elif lane.busy or settings.queued:
        here = here.clone() if up and not is_pinned(host) else here
        lane.put(lambda: there.copy_(here))
        return to
    else:
        lane.check()
    with torch.no_grad():
        there.copy_(here)
    return to


def to_copy(
    tensor: Tensor,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """``aten::_to_copy``; to the CPU without waiting into pinned memory, for which torch asks the device's C++."""
    to = tensor.device if device is None else torch.device(device)
    memory = torch.empty_like(
        tensor, dtype=dtype, device=to, memory_format=memory_format or torch.preserve_format, pin_memory=False
    )
    if non_blocking and not on_it(memory):
        pinned(memory)
    return memory.copy_(tensor, non_blocking)


def _across(source: Tensor, to: Tensor) -> Tensor:
    """From a device to a device: behind what both have queued, and before what they will."""
    mine, its = lane_of(to.device.index), lane_of(source.device.index)
    there, here = on_host(to), on_host(source)
    if not mine.busy and not its.busy and not settings.queued:
        there.copy_(here)
        return to
    if its is not mine:
        _behind(mine, its)
    mine.put(lambda: there.copy_(here))
    if its is not mine:
        _behind(its, mine)
    return to


def _behind(lane: Lane, other: Lane) -> None:
    """A lane goes on only when another has done what is queued there now."""
    if other.busy:
        lane.put(Mark.behind(other).wait)


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """``aten::_pin_memory`` of the CPU."""
    return tensor if is_pinned(tensor) else pinned(tensor.clone())


def overridable(name: str) -> Callable[..., Any]:
    """The convolutions that torch leaves to a device, by the CPU's."""
    known = Known(getattr(_aten, name).default)
    known.call = OVERRIDABLE[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if "backward" in name:  # the CPU's wants to know the bias's shape
            channels = args[2].shape[1] * args[8] if args[6] else args[2].shape[0]
            args = (*args[:3], [channels], *args[3:])
        return run(known, args[0].device.index, args, kwargs)

    return call


def whole(name: str) -> Callable[..., Any]:
    """The fallback for an operator of which torch would call a variant that writes into an output of another shape."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_aten, packet), "generator" if packet == "randperm" else overload or "default")
    return lambda *args, **kwargs: kernel(op, *args, **kwargs)


def native_dropout(values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """``aten::native_dropout``, which torch calls for devices; the CPU's draws from the CPU's generator."""
    index = values.device.index
    if p == 0 or train is False:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p)
    return run(_DROPPED, index, (values, mask, 1 / (1 - p) if p < 1 else 0.0), {}), mask


_DROPPED = Known(_aten.native_dropout_backward.default)  # values * mask * scale
