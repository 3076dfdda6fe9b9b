"""Synchronized batch norm, whose statistics include the samples of all ranks; supports CPUs.

    model = DistributedDataParallel(convert_sync_batchnorm(Net()))

Terms: a rank's *count* is the number of its elements of one channel (samples x positions). Forward gathers the
ranks' means, variances and counts in one message, and combines them in the order of the ranks, so every rank has the
same bits. Backward sums two numbers of each channel over the ranks, in one message.

Every rank must run the same layers, forwards and backwards, equally often: if a rank skips one, the others wait.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.engines.ddp import native_batch_norm as native
from lockstep.ground import comm
from lockstep.ground.rank import rank_zero_warn


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the samples of all ranks, with the same results as in one process with the full batch.

    Outputs, gradients and running statistics are those of ``torch.nn.BatchNorm*d`` on the concatenation of the ranks'
    batches, which may have different lengths, or be empty on some ranks. (A hand-written loop with batches of different
    lengths must weight its losses too.) Statistics are computed in float32, or in float64 for inputs of float64. Unlike
    ``torch.nn.SyncBatchNorm`` the layer runs on the CPU, and the running statistics have the same bits on all ranks.

    In ``eval()``, in a group of one rank and without a group the layer is plain batch norm, without communication.

    Args:
        num_features: number of channels ``C``.
        eps: added to the variance.
        momentum: momentum of the running statistics; None: their plain average over all batches.
        affine: learn a weight and a bias for each channel.
        track_running_stats: keep running statistics, for ``eval()``.
        process_group: process group of the ranks; None: the default group. If ranks may use different
            parameters in a step, pass a separate group (``dist.new_group()``): the messages of
            `DistributedDataParallel` and of this layer would otherwise not have the same order on all ranks.
        device: device of parameters and buffers.
        dtype: dtype of parameters and floating-point buffers.

    Shape:
        Input ``(N, C)`` or ``(N, C, ...)``, output the same; ``N`` may be 0.

    Attributes:
        zero_weight: True if this rank's batch does not count, because the rank runs the layer only for the other ranks.
            The batch is normalized as usual, but changes no statistics or gradients on any rank.
        partial: True if ``sync_group`` is a subset of the ranks, perhaps only one, since the others have no samples.

    Raises:
        ValueError: in training, on every rank, if all ranks together have fewer than two values of a channel.

    Source: Ioffe and Szegedy, Batch Normalization (2015), https://arxiv.org/abs/1502.03167.
    """

    sync_group: comm.Group = None
    zero_weight: bool = False
    partial: bool = False
    _plain: type[_BatchNorm] | None = None  # the former class of a converted layer

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: comm.Group = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.sync_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:  # a converted layer keeps its own check
        if input.dim() < 2:
            raise ValueError(f"expected an input with at least 2 dimensions, but got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, in training with the statistics of all ranks."""
        group, zero_weight = self.sync_group, self.zero_weight
        if not self.training or (comm.world_size(group) < 2 and not self.partial):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"the input has {input.shape[1]} channels, but this layer has num_features={self.num_features}"
            )
        if native.takes(input):
            return self._forward_natively(native.dense(input))
        mean, variance, count = _statistics(input, group, zero_weight)
        if self.track_running_stats:
            self._track(mean, variance, count)
        normalized: Tensor = _Normalize.apply(
            input, self.weight, self.bias, mean, variance, count, self.eps, group, zero_weight
        )
        return normalized

    def _forward_natively(self, input: Tensor) -> Tensor:
        group, zero_weight = self.sync_group, self.zero_weight
        count = _count(input, zero_weight)
        with torch.no_grad():
            rows = native.gather(input, count, self.eps, group)
            _check_total(count, rows[:, -1], input)
            running, factor = (self.running_mean, self.running_var), self.momentum
            # the factor of a plain average is not known on the host
            if not self.track_running_stats:
                statistics = native.combine(rows, self.eps)
            elif factor is None or any(r is not None and r.dtype != rows.dtype for r in running):
                statistics = native.combine(rows, self.eps)
                variance = statistics.inverse.square().reciprocal() - self.eps
                self._track(statistics.mean, variance, rows[:, -1].sum())
            else:
                statistics = native.combine(rows, self.eps, *running, factor)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
        normalized: Tensor = native.NativeNormalize.apply(
            input, self.weight, self.bias, statistics, self.eps, group, zero_weight
        )
        return normalized

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        factor: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = self.num_batches_tracked.to(mean.dtype).reciprocal()  # no `.item()`: a GPU would wait
        if self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1))
            for running, fresh in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_(factor * fresh + (1 - factor) * running)

    # -- copies. A group belongs to its process: a copy there shares the group; a pickled copy gets the default group.

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        copied = _blank(self._plain)
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name != "sync_group"}
        copied.__setstate__({**copy.deepcopy(state, memo), "sync_group": self.sync_group})
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self._plain,), {**vars(self), "sync_group": None}


# -- one collective forward, one backward


@torch.no_grad()
def _statistics(input: Tensor, group: comm.Group, zero_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, biased variance, count) by channel over the elements on all ranks. Collective."""
    channels = input.shape[1]
    wide = _wide(input)
    count = _count(input, zero_weight)
    if count:
        # the biased variance, like `torch.var_mean`, by a kernel that takes a tenth of its time on the CPU
        mean, variance = torch.batch_norm_update_stats(input.to(wide), None, None, 0.0)
        mine = torch.cat([mean, variance, mean.new_full((1,), count)])
    else:
        mine = torch.zeros(2 * channels + 1, dtype=wide, device=input.device)
    ranks = comm.all_gather_tensor(mine, group)
    means, variances, counts = ranks.split([channels, channels, 1], dim=1)
    _check_total(count, counts, input)
    total = counts.sum()
    parts = counts / total
    mean = (means * parts).sum(0)
    variance = ((variances + (means - mean).square()) * parts).sum(0)
    return mean, variance, total


def _count(input: Tensor, zero_weight: bool) -> int:
    """Return the number of elements per channel that enter the statistics: 0 with ``zero_weight``."""
    return 0 if zero_weight else input.numel() // max(input.shape[1], 1)


def _check_total(count: int, counts: Tensor, input: Tensor) -> None:
    """Check that a channel has at least two elements on all ranks together.

    Reading the number makes a GPU wait. It is below 2 only if every rank has fewer than 2, so then all ranks read it.
    """
    total = int(counts.sum().item()) if count < 2 else 2
    if total < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training: all ranks together have {total} (input of shape "
            f"{tuple(input.shape)} here). Drop the last batch (DataLoader(drop_last=True)), or use a different batch "
            "size."
        )


class _Normalize(torch.autograd.Function):
    """Autograd function ``(input - mean) / std * weight + bias``, with mean and std over the inputs on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: comm.Group,
        zero_weight: bool,
    ) -> Tensor:
        ctx.group, ctx.zero_weight, ctx.shift = group, zero_weight, None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, mean, (variance + eps).rsqrt(), count)
        wide = mean.dtype
        scale, shift = (None if tensor is None else tensor.to(wide) for tensor in (weight, bias))
        normalized: Tensor = torch.native_batch_norm(input, scale, shift, mean, variance, False, 0.0, eps)[0]
        return normalized

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        wide, dims, channels = mean.dtype, [0, *range(2, input.dim())], input.shape[1]
        shape = [1, channels] + [1] * (input.dim() - 2)
        grad = grad.to(wide)
        offset = input.to(wide) - mean.view(shape)
        sums, products = grad.sum(dims), (grad * offset).sum(dims)
        # gradients of weight and bias are this rank's alone: the averaging of gradients adds up the ranks'
        grad_weight = (products * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = sums.to(ctx.shift) if ctx.needs_input_grad[2] else None
        grad_input = None
        if ctx.needs_input_grad[0]:
            packed = torch.cat([sums, products])
            if ctx.zero_weight:
                packed = torch.zeros_like(packed)  # not 0 x packed, which may be NaN
            means = comm.all_reduce(packed, "sum", ctx.group) / count
            mean_grad, mean_product = means.split(channels)
            offset.mul_((inverse.square() * mean_product).view(shape)).add_(mean_grad.view(shape))
            scale = inverse if weight is None else inverse * weight.to(wide)
            grad_input = torch.sub(grad, offset, out=offset).mul_(scale.view(shape)).to(input.dtype)
        return grad_input, grad_weight, grad_bias, *[None] * 6


def _wide(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


# -- there and back


def convert_sync_batchnorm(module: nn.Module, process_group: comm.Group = None) -> nn.Module:
    """Convert the batch norms in ``module``, or ``module`` itself, to use the statistics of all ranks.

    Each layer remains the same object, with its parameters, buffers, hooks and mode, and an instance of its class
    (such as ``nn.BatchNorm2d``). The state dict is the same. ``torch.nn.SyncBatchNorm`` is converted too, so that it
    runs on the CPU. Layers that are already converted stay as they are.

    A subclass is converted if it uses torch's ``forward``. One with its own ``forward``, or a lazy layer that has not
    seen a batch, is not converted, with a warning.

    Args:
        module: changed in place.
        process_group: process group of the ranks; None: the group of a ``torch.nn.SyncBatchNorm``, else the default
            group.

    Returns:
        ``module``.

    Example::

        model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    """
    skipped: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        kind: Any = type(layer)
        torchs = kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(layer)
        if not torchs or isinstance(layer, LazyModuleMixin):
            skipped.setdefault(kind.__name__, name)
            continue
        if process_group is None:
            layer.sync_group = getattr(layer, "process_group", None)  # type: ignore[assignment]
        else:
            layer.sync_group = process_group  # type: ignore[assignment]
        layer.__class__ = _synchronized(kind)
    for kind_name, name in skipped.items():
        rank_zero_warn(
            f"convert_sync_batchnorm does not convert {name!r}, because its class {kind_name} overrides `forward`, or "
            "is lazy and has not seen a batch. The layer uses the statistics of each rank's own samples."
        )
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Undo `convert_sync_batchnorm`: restore the class of every converted layer.

    Layers that were created as a SyncBatchNorm do not change.

    Args:
        module: changed in place.

    Returns:
        ``module``.
    """
    for layer in synchronized_layers(module):
        if layer._plain is not None:
            for name in ("sync_group", "zero_weight"):
                vars(layer).pop(name, None)
            layer.__class__ = layer._plain  # type: ignore[assignment]
    return module


def synchronized_layers(module: nn.Module) -> Iterator[SyncBatchNorm]:
    """Yield each layer inside ``module`` that uses the statistics of all ranks, without duplicates."""
    return (layer for layer in module.modules() if isinstance(layer, SyncBatchNorm))


@functools.cache
def _synchronized(plain: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """Return the class to which layers of the class ``plain`` are converted: a subclass of ``plain``."""
    name = plain.__name__ if plain.__name__.startswith("Sync") else f"Sync{plain.__name__}"
    return type(name, (SyncBatchNorm, plain), {"_plain": plain, "_check_input_dim": plain._check_input_dim})


def _blank(plain: type[_BatchNorm] | None) -> SyncBatchNorm:
    """Return a layer without attributes, which `copy` and `pickle` then fill."""
    kind = SyncBatchNorm if plain is None else _synchronized(plain)  # type: ignore[arg-type]
    return kind.__new__(kind)
