"""What the tests of communication hooks are made of: buckets of known gradients, and a count of what is sent."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(), (1,), (3,), (2, 3), (0, 2), (7,), (9, 8), (1, 1, 5), (6, 2, 3), (40,)]


def gradients(shapes: Sequence[Shape], rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A rank's gradients in a step: the same whoever asks."""
    generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


class Model:
    """Parameters of some shapes, cut into buckets."""

    def __init__(self, cut: Sequence[Sequence[Shape]], dtype: torch.dtype = torch.float32) -> None:
        self.cut = [list(shapes) for shapes in cut]
        self.dtype = dtype
        self.parameters = [[nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes] for shapes in self.cut]

    def buckets(self, rank: int, step: int, change: Callable[[Tensor], Any] | None = None) -> list[GradBucket]:
        """The buckets of one round, with a rank's gradients in them."""
        made = []
        for index, parameters in enumerate(self.parameters):
            values = gradients(self.cut[index], rank, 10 * step + index, self.dtype)
            flat = torch.cat([value.reshape(-1) for value in values]) if values else torch.empty(0, dtype=self.dtype)
            if change is not None:
                change(flat)
            views, start = [], 0
            for value in values:
                views.append(flat[start : start + value.numel()].view(value.shape))
                start += value.numel()
            made.append(GradBucket(index, flat, views, parameters, index + 1 == len(self.parameters)))
        return made


def play(hook: Any, state: Any, buckets: Sequence[GradBucket]) -> list[Tensor]:
    """One round as the reducer plays it: all hooks in order, then all results."""
    dtypes = [bucket.buffer().dtype for bucket in buckets]  # torch's wrappers put other buffers into the buckets
    futures = [hook(state, bucket) for bucket in buckets]
    found = []
    for future, dtype in zip(futures, dtypes, strict=True):
        value = future.wait()
        value = value[0] if isinstance(value, list) else value
        found.append(value.to(dtype, copy=True))
    return found


class Wire:
    """Messages of this rank while it is counted, and the bytes that a ring would have it send for them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bytes = 0.0


@contextlib.contextmanager
def counted() -> Iterator[Wire]:
    """Count the calls of torch.distributed's collectives, whoever makes them."""
    wire = Wire()

    def count(name: str, sent: Callable[[int, tuple[Any, ...]], float]) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            wire.calls.append(name)
            wire.bytes += sent(dist.get_world_size(group), args)
            return original(*args, **kwargs)

        return call

    ways: dict[str, Callable[[int, tuple[Any, ...]], float]] = {
        "all_reduce": lambda world, args: 2 * (world - 1) / world * args[0].nbytes,
        "all_to_all_single": lambda world, args: (world - 1) / world * args[1].nbytes,
        "all_gather_single": lambda world, args: (world - 1) * args[1].nbytes,
        "all_gather_into_tensor": lambda world, args: (world - 1) * args[1].nbytes,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, sent in ways.items():
            if hasattr(dist, name):
                patch.setattr(dist, name, count(name, sent))
        yield wire


def as_checkpoint(state: Any) -> Any:
    """What a checkpoint would give back of ``state``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same_on_all(results: Sequence[Any]) -> bool:
    """Whether all ranks have the same bits, NaN included."""
    return all(_bits(one) == _bits(results[0]) for one in results)


def _bits(tensors: Sequence[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]
