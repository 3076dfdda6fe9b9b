"""The size of batches that come ready-made: nobody here drew their samples, so that the first tensor tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from lockstep.ground.rank import rank_zero_info


class Measure:
    """Tells how many samples are in the ready-made batches of a loader, and says once how it finds that.

    Args:
        name: what messages call the loader.
        stage: "train", "val", "test" or "predict"; nothing is weighed in a prediction.
    """

    def __init__(self, name: str, stage: str) -> None:
        self.name = name
        self._told = stage == "predict"
        self._training = stage == "train"

    def __call__(self, batch: Any) -> float:
        """The number of samples; 1 where it cannot be told."""
        tensor = first_tensor(batch)
        # one without rows is no reason for a rank to be left out
        size = float(len(tensor) or 1) if tensor is not None and tensor.ndim else 1.0
        if not self._told and (tensor is None or (len(tensor) if tensor.ndim else tensor is not batch)):
            self._told = True
            self._tell(tensor, size)
        return size

    def each(self, batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Batches with their sizes."""
        return ((batch, self(batch)) for batch in batches)

    def _tell(self, tensor: Any, size: float) -> None:
        way_out = "give `self.log(..., batch_size=samples)`"
        if self._training:
            way_out += ' and return {"loss": loss, "weight": samples}'
        if tensor is None:
            rank_zero_info(f"{self.name} gives ready-made batches without a tensor: each weighs 1. Else {way_out}.")
            return
        if not tensor.ndim:
            found = "the first tensor in them has no dimension"
            rank_zero_info(f"{self.name} gives ready-made batches, and {found}: each weighs 1. Else {way_out}.")
            return
        rank_zero_info(
            f"{self.name} gives ready-made batches: each weighs as many samples as its first tensor is long, the "
            f"first one {size:g} (shape {tuple(tensor.shape)}). Where that is not their number, {way_out}."
        )


def first_tensor(batch: Any) -> Any:
    """The first tensor or array of a nest, in its order; None where there is none."""
    if isinstance(batch, Tensor) or (hasattr(batch, "__array__") and hasattr(batch, "shape")):
        return batch
    if isinstance(batch, Mapping):
        items: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    else:
        return None
    return next((found for item in items if (found := first_tensor(item)) is not None), None)
