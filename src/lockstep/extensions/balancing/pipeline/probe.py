"""Measurement of each block of a chain on a device: seconds of forward and backward, and bytes of activations.

Each device measures all blocks. Blocks of other devices get made-up weights of the same shapes, one block at a time.
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
from lockstep.ground.parameters import is_placeholder
from lockstep.ground.seed import forked_random_numbers

PASSES = 5, 20
"""Passes through all blocks: minimum, and maximum if they take little time."""
LITTLE, PATIENCE = 0.3, 10.0
"""Seconds until which passes continue, and after which none starts once two were measured."""
STAND_IN = 0.01
"""Value of made-up weights."""
AS_ADAM = 2.0
"""Bytes of states for a byte of a parameter, if an optimizer cannot be tried."""


@dataclass(frozen=True)
class Like:
    """Shape and dtype of a tensor, from which inputs for measurements are created."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Create the description of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def create(self, device: torch.device) -> Tensor:
        """Create a tensor of this shape and dtype with normal random numbers."""
        return torch.randn(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)


def probe(
    stages: Stages,
    like: Like,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    extras_of: Callable[[], Extras] = tuple,
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Measure the forward and backward of each block of a chain. Weights, buffers and random states are restored.

    Args:
        stages: this rank's stages, which refer to all blocks of the chain.
        like: the input of the first block.
        device: a device of this process.
        clock: returns seconds.
        extras_of: creates the blocks' other arguments. It is called for each pass, since blocks may change them.

    Returns:
        for each block the seconds of a micro-batch, above 0, and the bytes that its forward keeps, without parameters.

    Raises:
        MisconfigurationException: the output of a block cannot be sent to the next stage.
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
            with _place_weights(block, device), _count_kept(block) as kept:  # a warm-up
                likes.append(Like.of(_run(stages, place, block, likes[-1].create(device), extras)))
            keeps.append(sum(kept.values()))
        passes: list[list[float]] = []
        (least, most), start = PASSES, time.perf_counter()
        while True:
            extras = extras_of()
            calling = _measure_block(stages, 0, _Nothing(), likes[0], device, clock, extras)
            each = [
                _measure_block(stages, place, block, likes[place], device, clock, extras)
                for place, block in enumerate(blocks)
            ]
            # the overhead of a call is not the block's
            passes.append([max(seconds - calling, seconds / 10) for seconds in each])
            spent = time.perf_counter() - start
            if len(passes) >= 2 and (spent >= PATIENCE or len(passes) >= (most if spent < LITTLE else least)):
                break
    # other work of the machine slows down a whole pass: shares within passes vary less than seconds of blocks
    typical = median(sum(each) for each in passes)
    usable = [each for each in passes if sum(each)] or [[1.0] * len(blocks)]  # the clock may be too coarse
    shares = [median(each[place] / sum(each) for each in usable) for place in range(len(blocks))]
    return tuple(max(typical * share, 1e-9) for share in shares), tuple(keeps)


class _Nothing(nn.Module):
    """A block that computes nothing, to measure the overhead of a call."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x.view_as(x)


def _measure_block(
    stages: Stages,
    place: int,
    block: nn.Module,
    like: Like,
    device: torch.device,
    clock: Callable[[], float],
    extras: Extras,
) -> float:
    """Return the seconds of one forward and backward of a block."""
    with _place_weights(block, device):
        x = like.create(device)
        begin = _now(device, clock)
        _run(stages, place, block, x, extras)
        return _now(device, clock) - begin


def _now(device: torch.device, clock: Callable[[], float]) -> float:
    synchronize(device)
    return clock()


def _run(stages: Stages, place: int, block: nn.Module, x: Tensor, extras: Extras) -> Tensor:
    """Run forward and backward of a block, and return its output."""
    # a block must not change a leaf in place
    given = x.clone() if any(getattr(layer, "inplace", False) for layer in block.modules()) else x
    args, kwargs = extra_on(x.device, extras, place)
    with stages.context():
        out: Tensor = block(given, *args, **kwargs)
    stages.check(out, place)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    return out


@contextmanager
def _count_kept(block: nn.Module) -> Iterator[dict[int, int]]:
    """Record the size in bytes of each storage, except parameters, that forwards in the context save for backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextmanager
def _place_weights(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Place a block's weights on the device, without gradients; restore weights, gradients and buffers on exit."""
    parameters, buffers = list(block.parameters()), list(block.buffers())
    before = [(p.data, p.grad) for p in parameters]
    copies = [(buffer.data, buffer.detach().clone()) for buffer in buffers]
    try:
        for parameter in parameters:
            parameter.grad = None
            if is_placeholder(parameter) or parameter.device != device:
                # the speed of a block does not depend on its values; the freed ones' NaN could make it slower
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
    """Return the ratio of optimizer state bytes to trained parameter bytes, the largest of all ``optimizers``.

    If an optimizer has no states yet, a second one of the same class and settings steps a small parameter.
    """
    found = []
    for optimizer in optimizers:
        of_tensors = [(p, state) for p, state in optimizer.state.items() if isinstance(p, Tensor)]
        size = sum(p.nbytes for p, _ in of_tensors)
        if not size:
            found.append(_try_optimizer(optimizer))
            continue
        states = [v for _, state in of_tensors for v in state.values() if isinstance(v, Tensor)]
        found.append(sum(value.nbytes for value in states) / size)
    return max(found, default=0.0)


def _try_optimizer(optimizer: Optimizer) -> float:
    """Return the ratio of state bytes to parameter bytes after a trial step; Adam's ratio if the step fails."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    try:
        trial = type(optimizer)([parameter], **optimizer.defaults)
        trial.step()
    except Exception:  # a user's class may take other arguments than its settings, and raise anything
        return AS_ADAM
    states = [value for value in trial.state[parameter].values() if isinstance(value, Tensor)]
    return float(sum(value.nbytes for value in states if value.shape == parameter.shape)) / parameter.nbytes
