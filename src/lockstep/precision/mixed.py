"""Mixed precision: parameters in 32 bits, most of the arithmetic of a step in 16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import LossScaler, Precision


class MixedPrecision(Precision):
    """``bf16-mixed`` and ``16-mixed``: steps under ``torch.autocast``; the latter with a loss scale.

    Args:
        name: ``"bf16-mixed"`` or ``"16-mixed"``.
        device_type: where the steps run.

    Raises:
        MisconfigurationException: ``16-mixed`` where there is no GPU.
    """

    def __init__(self, name: str, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.name = name
        self.dtype = torch.bfloat16 if name == "bf16-mixed" else torch.float16
        if name == "16-mixed":
            if device_type != "cuda":
                raise MisconfigurationException(
                    f"precision='16-mixed' on {device_type!r}: float16 is for CUDA devices; "
                    "use precision='bf16-mixed', which has the range of float32, or '32-true'"
                )
            self.scaler = LossScaler(device_type)
        self.context = self._autocast

    def _autocast(self) -> AbstractContextManager[Any]:
        # Without autocast's cache of cast weights: a weight cast first under no_grad would come out of the
        # cache without its graph in the forward that trains, and get no gradient.
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False)
