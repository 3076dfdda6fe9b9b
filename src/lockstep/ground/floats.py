"""Values as Python's numbers, those on a device by one copy: each copy waits for all that the device has yet to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.device import widest


def floats(values: Sequence[Any]) -> list[float]:
    """Numbers and tensors of one element as numbers, in their order."""
    far = [value.detach().reshape(()) for value in values if _is_far(value)]
    if len({value.device for value in far}) != 1:
        return [float(value) for value in values]
    dtype = widest(far[0].device)
    found = iter(torch.stack([value.to(dtype) for value in far]).tolist())
    return [next(found) if _is_far(value) else float(value) for value in values]


def _is_far(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
