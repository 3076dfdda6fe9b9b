"""What each block of a chain costs on a device: seconds of a forward and a backward, and the bytes that it keeps.

A device has the weights of its own blocks alone. For the others made-up weights of the same shapes stand in, one block
at a time, since what a block takes does not hang on its values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.extensions.balancing.pipeline.chain import Extras
from lockstep.extensions.balancing.pipeline.stages import Stages, extra_on
from lockstep.ground.device import current_device, synchronize
from lockstep.ground.parameters import stands_in
from lockstep.ground.seed import forked_random_numbers

PASSES = 5, 20
"""Passes through all blocks, of which each block's median counts: at least, and while they take little time."""
LITTLE, PATIENCE = 0.3, 10.0
"""Seconds until which passes go on, and after which none begins, if two have been measured."""
STAND_IN = 0.01
"""Each element of made-up weights."""
AS_ADAM = 2.0
"""Bytes of states for a byte of a parameter, where an optimizer does not show its own."""


@dataclass(frozen=True)
class Like:
    """The tensor that a chain is called with: all but its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def made(self, device: torch.device) -> Tensor:
        """Such a tensor, of normal random numbers."""
        return torch.randn(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class BlockProbe:
    """What a block took here.

    Attributes:
        seconds: forward and backward of a micro-batch.
        keeps: bytes that its forward keeps for the backward, parameters apart.
    """

    seconds: float
    keeps: int


def probe(
    stages: Stages,
    like: Like,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    extras_of: Callable[[], Extras] = tuple,
) -> list[BlockProbe]:
    """Run each block of a chain by itself, forward and backward; all is as before afterwards.

    Args:
        stages: of the chain, as this rank sees them.
        like: what the first block is given.
        device: of this process.
        clock: seconds.
        extras_of: makes what blocks take besides, anew for each pass: they may write into it.

    Raises:
        MisconfigurationException: a block gives what cannot go to the next stage.
    """
    blocks = stages.chain.blocks
    with (
        forked_random_numbers([device]),
        current_device(device),
        torch.enable_grad(),
        stages.chain.running(),
    ):
        likes, keeps, extras = [like], [], extras_of()
        for place, block in enumerate(blocks):
            with _whole(block, device), _counting(block) as kept:  # a warm-up
                likes.append(Like.of(_run(stages, place, block, likes[-1].made(device), extras)))
            keeps.append(sum(kept.values()))
        passes: list[list[float]] = []
        begun = time.perf_counter()
        while _goes_on(len(passes), time.perf_counter() - begun):
            extras = extras_of()
            # what else the machine does meanwhile slows down a pass, and not one block
            calling = _timed(stages, 0, _Nothing(), likes[0], device, clock, extras)
            each = [
                _timed(stages, place, block, likes[place], device, clock, extras) for place, block in enumerate(blocks)
            ]
            passes.append([max(seconds - calling, seconds / 10) for seconds in each])
    typical = median(sum(each) for each in passes)
    told = [each for each in passes if sum(each)]  # a clock may be too coarse
    shares = [median(each[place] / sum(each) for each in told or [[1.0] * len(blocks)]) for place in range(len(blocks))]
    return [BlockProbe(typical * share, kept) for share, kept in zip(shares, keeps, strict=True)]


def _goes_on(passes: int, seconds: float) -> bool:
    least, most = PASSES
    return passes < 2 or (seconds < PATIENCE and passes < (most if seconds < LITTLE else least))


class _Nothing(nn.Module):
    """A block that computes nothing: what it takes is what calling a block by itself takes."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x.view_as(x)


def _timed(
    stages: Stages,
    place: int,
    block: nn.Module,
    like: Like,
    device: torch.device,
    clock: Callable[[], float],
    extras: Extras,
) -> float:
    """Seconds of a block."""
    with _whole(block, device):
        x = like.made(device)
        begin = _now(device, clock)
        _run(stages, place, block, x, extras)
        return _now(device, clock) - begin


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    synchronize(device)
    return clock()


def _run(stages: Stages, place: int, block: nn.Module, x: Tensor, extras: Extras) -> Tensor:
    """The output of a forward; its backward has run, too."""
    # a leaf is changed in place by no block
    given = x.clone() if any(getattr(layer, "inplace", False) for layer in block.modules()) else x
    args, kwargs = extra_on(x.device, extras, place)
    with stages.context():
        out: Tensor = block(given, *args, **kwargs)
    stages.check(out, place)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    return out


@contextmanager
def _counting(block: nn.Module) -> Iterator[dict[int, int]]:
    """Inside, what a forward keeps for the backward, parameters apart: bytes by memory."""
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def _whole(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a block has weights on the device, and gradients of nobody's; buffers are put back."""
    parameters, buffers = list(block.parameters()), list(block.buffers())
    before = [(p.data, p.grad) for p in parameters]
    copies = [(buffer.data, buffer.detach().clone()) for buffer in buffers]
    try:
        for parameter in parameters:
            parameter.grad = None
            if stands_in(parameter) or parameter.device != device:
                value = STAND_IN if parameter.is_floating_point() else 0
                parameter.data = torch.full(parameter.shape, value, dtype=parameter.dtype, device=device)
        for buffer in buffers:
            buffer.data = buffer.data.to(device)
        yield
    finally:
        for parameter, (value_before, gradient) in zip(parameters, before, strict=True):
            parameter.grad = None
            parameter.data, parameter.grad = value_before, gradient
        with torch.no_grad():
            for buffer, (memory, copy) in zip(buffers, copies, strict=True):
                buffer.data = memory
                buffer.copy_(copy)


def states_of(optimizers: Sequence[Optimizer]) -> float:
    """Bytes of optimizer states for a byte of a trained parameter.

    By the states that are there; else by those of one step of an optimizer of the same class and settings.
    """
    found = []
    for optimizer in optimizers:
        of_tensors = [(p, state) for p, state in optimizer.state.items() if isinstance(p, Tensor)]
        size = sum(p.nbytes for p, _ in of_tensors)
        if not size:
            found.append(_tried_out(optimizer))
            continue
        states = [v for _, state in of_tensors for v in state.values() if isinstance(v, Tensor)]
        found.append(sum(value.nbytes for value in states) / size)
    return max(found, default=0.0)


def _tried_out(optimizer: Optimizer) -> float:
    """As Adam's where it cannot be told: an optimizer whose class takes other arguments than its settings."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    try:
        tried = type(optimizer)([parameter], **optimizer.defaults)
        tried.step()
    except Exception:  # of any class of the user's
        return AS_ADAM
    states = [value for value in tried.state[parameter].values() if isinstance(value, Tensor)]
    return float(sum(value.nbytes for value in states if value.shape == parameter.shape)) / parameter.nbytes
