"""What programs are made of: loaders, optimizers, and layers that are made late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset


class NeedsClosure(torch.optim.SGD):
    """An optimizer whose step needs its closure, and calls it without gradients being recorded outside of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def samples(seed: int, count: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 3, generator=source))


def late_layers(recorded: Callable[[Any], Any] | None) -> Callable[[Any], None]:
    """A ``configure_model`` that makes the layers, once."""

    def configure_model(self: Any) -> None:
        if recorded is not None:
            recorded(self)
        if not hasattr(self, "first"):
            self.layers()

    return configure_model


class Batches:
    """Batches that are there, in a class of the user's."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class Stream(IterableDataset[Tensor]):
    """Samples without a length."""

    def __init__(self, data: list[Tensor]) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._data)
