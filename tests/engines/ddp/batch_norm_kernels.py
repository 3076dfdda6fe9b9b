"""torch's five CUDA kernels of synchronized batch norm, by their equations, on the CPU; each notes what it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.engines.ddp import native_batch_norm


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert_dense(input)
    flat = by_channel(input)
    return flat.mean(1), (flat.var(1, correction=0) + eps).rsqrt()


def gather_stats_with_counts(
    kind: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert counts.dtype == (kind if running_mean is None else running_mean).dtype
    assert means.dtype == inverses.dtype == wide(kind)
    seen = 0  # an integer there
    mean, squares = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for m, inverse, count in zip(means, inverses, counts, strict=True):
        factor = 1 / (seen + count)  # of nobody's nothing it is infinite
        squares += ((1 / inverse).square() - eps) * count + (mean - m).square() * seen * count * factor
        mean = seen * factor * mean + count * factor * m
        seen += int(count)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * squares / (seen - 1))
    return mean, (squares / seen + eps).rsqrt()


def elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    assert_dense(input)
    assert_types(input, weight, bias, mean, inverse)
    shape = [1, -1] + [1] * (input.dim() - 2)
    result = (input.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    return (result if bias is None else result + bias.view(shape)).to(input.dtype)


def backward_reduce(
    grad: Tensor, input: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *needs: bool
) -> tuple[Tensor | None, ...]:
    assert_dense(input)
    assert_types(input, weight, None, mean, inverse)
    assert grad.dtype == input.dtype
    assert grad.stride() == input.stride()
    assert weight is not None or not needs[1]
    sums = by_channel(grad).sum(1)
    products = (by_channel(grad) * (by_channel(input) - mean[:, None])).sum(1)
    found = [sums, products, products * inverse, sums]
    wanted = [needs[0], needs[0], needs[1], needs[2]]
    return tuple(each if wants else None for each, wants in zip(found, wanted, strict=True))


def backward_elemt(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    products: Tensor,
    counts: Tensor,
) -> Tensor:
    assert_types(input, weight, None, mean, inverse)
    assert counts.dtype == torch.int32
    shape = [1, -1] + [1] * (input.dim() - 2)
    total = int(counts.sum())
    offset = (input.to(mean.dtype) - mean.view(shape)) * (inverse.square() * products / total).view(shape)
    scale = inverse if weight is None else inverse * weight
    return ((grad.to(mean.dtype) - (sums / total).view(shape) - offset) * scale.view(shape)).to(input.dtype)


def wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def by_channel(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor)).transpose(0, 1).flatten(1)


def assert_dense(input: Tensor) -> None:
    assert input.numel(), "the kernels take no empty tensor"
    assert input.is_contiguous() or any(
        input.dim() == dims and input.is_contiguous(memory_format=layout)
        for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )


def assert_types(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> None:
    others = [each for each in (weight, bias, mean, inverse) if each is not None]
    assert {each.dtype for each in others} == {wide(input)}


NAMES: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats_with_counts,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}


class Traffic(TorchDispatchMode):
    """Bytes that operators read and write; one of the five is one operator.

    Attributes:
        moved: name and bytes of each operator.
    """

    VIEWS = ("view", "detach", "expand", "squeeze", "split", "::t", "slice", "select", "strided", "alias", "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[str, int]] = []
        self.is_inside = False

    def note(self, name: str, *values: object) -> None:
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
        self.moved.append((name, sum(each.nbytes for each in tensors)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.is_inside and not any(view in str(func) for view in self.VIEWS):
            self.note(str(func), args, kwargs, result)
        return result


@contextmanager
def installed(traffic: Traffic | None = None) -> Iterator[None]:
    """Inside, layers take the five as if they were on a GPU."""
    before: dict[str, Any] = {name: getattr(torch, name) for name in NAMES}
    takes = native_batch_norm.takes

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if traffic is None:
                return own(*args)
            traffic.is_inside = True
            result = own(*args)
            traffic.is_inside = False
            traffic.note(name, args, result)
            return result

        return call

    try:
        native_batch_norm.takes = lambda input: True
        for name, own in NAMES.items():
            setattr(torch, name, noted(name, own))
        yield
    finally:
        native_batch_norm.takes = takes
        for name, own in before.items():
            setattr(torch, name, own)
