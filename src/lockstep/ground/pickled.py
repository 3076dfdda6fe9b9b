"""Objects on their way to other processes, pickled with their tensors on the CPU.

A pickled tensor of a device is unpickled onto the device of the same number: ranks would begin to use the devices of
others, with some hundred megabytes for each, and hold there what they got.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_HOSTS = ("cpu", "meta")
_PLAIN = (Tensor, Parameter)
"""Classes of tensors that are moved; others say themselves how they are pickled."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) not in _PLAIN or value.device.type in _HOSTS:
            return NotImplemented
        return on_host(value).__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def on_host(value: Tensor) -> Tensor:
    """A tensor of a device on the CPU; one that is there as it is."""
    if type(value) not in _PLAIN or value.device.type in _HOSTS:
        return value
    copy = value.detach().cpu()
    return Parameter(copy, value.requires_grad) if type(value) is Parameter else copy


def packed(value: object) -> bytes:
    """An object as bytes; tensors of a device arrive on the CPU."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.DEFAULT_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The object of which `packed` made these bytes: only of a process that is trusted."""
    return pickle.loads(data)
