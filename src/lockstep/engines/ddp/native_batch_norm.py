"""Batch norm over all ranks with torch's CUDA kernels: 8 reads or writes of each activation, in the input's dtype.

The CPU's path uses float32 copies, with five times the bytes and three times the kernels. Here too, statistics of
16-bit inputs are float32. Nothing is copied to the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.ground import comm

ZERO_COUNT = 1e-30
"""Replaces a rank's count of 0, because the kernel divides by a running sum of counts; as an integer it is 0."""


class Statistics(NamedTuple):
    """Statistics of each channel over the elements on all ranks, and the number of elements on each rank."""

    mean: Tensor
    inverse: Tensor  #: 1 / sqrt(variance + eps)
    counts: Tensor


def takes(input: Tensor) -> bool:
    """Return True if torch's CUDA kernels support this input."""
    return input.device.type == "cuda"


def dense(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in a layout that kernels read in one pass: unchanged if channels last, else contiguous."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if layout is torch.channels_last else 5) and tensor.is_contiguous(memory_format=layout):
            return tensor
    return tensor.contiguous()


def gather(input: Tensor, count: int, eps: float, group: comm.Group) -> Tensor:
    """Gather one row from each rank: channel means, 1 / sqrt(variance + eps), and element count. Collective.

    Args:
        input: this rank's input, dense.
        count: number of elements of a channel that count.
        eps: added to variances.
        group: process group of the ranks.
    """
    channels = input.shape[1]
    if count:
        mean, inverse = torch.batch_norm_stats(input, eps)
        mine = torch.cat([mean, inverse, mean.new_full((1,), count)])
    else:
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        mine = torch.ones(2 * channels + 1, dtype=wide, device=input.device)
        mine[:channels] = 0
        mine[2 * channels :] = ZERO_COUNT
    return comm.all_gather_tensor(mine, group)


def combine(
    rows: Tensor,
    eps: float,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.0,
) -> Statistics:
    """Combine the ranks' rows into `Statistics`, in rank order, and update the running statistics (same dtype)."""
    channels = rows.shape[1] // 2
    means, inverses, counts = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, 2 * channels]
    # the dtype of the first argument alone selects the kernel: a 16-bit one would read 16-bit counts
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        means, means, inverses, running_mean, running_var, momentum, eps, counts
    )
    return Statistics(mean, inverse, counts.to(torch.int32))


class NativeNormalize(torch.autograd.Function):
    """Autograd function for ``(input - mean) * inverse * weight + bias``, with statistics over all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        eps: float,
        group: comm.Group,
        zero_weight: bool,
    ) -> Tensor:
        mean, inverse, counts = statistics
        # the kernels accept any input dtype with parameters in the statistics' dtype
        scale, shift = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        ctx.group, ctx.zero_weight = group, zero_weight
        ctx.types = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        ctx.save_for_backward(input, scale, mean, inverse, counts)
        if not input.numel():
            return torch.empty_like(input)
        normalized: Tensor = torch.batch_norm_elemt(input, scale, shift, mean, inverse, eps)
        return normalized

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, scale, mean, inverse, counts = ctx.saved_tensors
        needs: list[bool] = [
            need and ctx.types[i - 1] is not None for i, need in enumerate(ctx.needs_input_grad[1:3], 1)
        ]
        channels, is_empty = input.shape[1], not input.numel()
        if is_empty:
            grad_weight = grad_bias = mean.new_zeros(channels)
        else:
            grad = grad if grad.stride() == input.stride() else torch.empty_like(input).copy_(grad)
            *mine, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, input, mean, inverse, scale, ctx.needs_input_grad[0], *needs
            )
        grad_input = None
        if ctx.needs_input_grad[0]:
            counts_for_nothing = is_empty or ctx.zero_weight
            sums = mean.new_zeros(2 * channels) if counts_for_nothing else torch.cat(mine)
            of_all, of_all_x = comm.all_reduce(sums, "sum", ctx.group).split(channels)
            if is_empty:
                grad_input = torch.empty_like(input)
            else:
                grad_input = torch.batch_norm_backward_elemt(
                    grad, input, mean, inverse, scale, of_all, of_all_x, counts
                )
        # gradients of weight and bias are this rank's alone: the averaging of gradients adds up the ranks'
        own = [
            each.to(kind) if need else None
            for each, kind, need in zip((grad_weight, grad_bias), ctx.types, needs, strict=True)
        ]
        return grad_input, *own, None, None, None, None
