"""Objects on their way to another process, through a file."""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch
from torch import Tensor

STAYS = ("cpu", "meta")
"""Types of devices whose tensors travel as they are."""


def pack(obj: Any, file: IO[bytes]) -> None:
    """Write an object by cloudpickle, with all its tensors as CPU tensors.

    A process that reads it can have other devices, or none; on a GPU each reader would allocate a copy.

    Raises:
        whatever pickling raises: there are objects that cannot travel, such as locks and open files.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, Tensor) and thing.device.type not in STAYS:
                return _on_cpu(thing).__reduce_ex__(2)
            return super().reducer_override(thing)

    Pickler(file).dump(obj)


def unpack(file: IO[bytes]) -> Any:
    """Read the next object that `pack` wrote."""
    return pickle.load(file)


def _on_cpu(tensor: Tensor) -> Tensor:
    copy = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
    return torch.nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else copy
