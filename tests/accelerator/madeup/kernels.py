"""The operators of the made-up device: one fallback, which runs the CPU's on twins, at once or behind the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.testing.host_group import mapped, tensors
from tests.accelerator.madeup.memory import CPU, on_device, on_host, on_it, place
from tests.accelerator.madeup.numbers import generators
from tests.accelerator.madeup.queues import count_wait, lane_of, number
from tests.accelerator.madeup.settings import NAME, settings

WAITING = frozenset(
    [
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
        "_linalg_check_errors",
        "_linalg_eigh",
        "_linalg_svd",
        "linalg_eig",
    ]
)
"""Operators whose result, or its shape, the host needs: it waits for the device."""
MIXED = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_foreach_copy_"])
"""Operators that take tensors of the CPU beside those of the device."""
OVERRIDABLE = {
    "convolution_overrideable": torch.ops.aten.convolution.default,
    "convolution_backward_overrideable": torch.ops.aten.convolution_backward.default,
}
"""Operators that torch has for devices alone, and the CPU's in their place."""

WHOLE = [
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
    "conj_physical_",
]
"""Operators that torch would else make of their variants for outputs, which change the output's shape."""

NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")
"""Normalizations, of which the CPU has statistics in the type of the input, unless a weight has another."""

without_shapes: set[str] = set()
"""Operators for which the host had to wait as torch cannot tell the shapes of their results beforehand."""


class Known:
    """What is to be known of an operator."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.call = op
        self.name: str = op.name().removeprefix("aten::").partition(".")[0]
        returned = [each.alias_info for each in schema.returns]
        self.view = torch.Tag.inplace_view in op.tags or self.name == "set_"
        self.view |= any(each is not None and not each.is_write for each in returned)
        arguments = schema.arguments
        self.names = [each.name for each in arguments]
        self.writes = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        self.outs = [each.name for each in arguments if each.is_out]
        self.draws = "generator" in self.names
        self.tensors = [isinstance(each.type, torch.TensorType) for each in arguments]
        self.returns = len(schema.returns)

    def numbers(self, args: Sequence[Any]) -> bool:
        """Whether a number stands where a tensor is due: torch hands a number in a tensor to Python so."""
        return any(
            due and isinstance(each, int | float | complex) for due, each in zip(self.tensors, args, strict=False)
        )

    def with_tensors(self, args: Sequence[Any], others: list[Tensor]) -> tuple[Any, ...]:
        """The arguments with tensors in the place of such numbers, of a type that changes no result's."""
        floating = next((each.dtype for each in others if each.is_floating_point() or each.is_complex()), None)

        def made(number: Any) -> Tensor:
            whole = isinstance(number, int)  # a bool is one
            return torch.tensor(number, dtype=None if whole or isinstance(number, complex) else floating)

        number = int | float | complex
        pairs = zip(self.tensors, args, strict=False)
        return tuple(made(each) if due and isinstance(each, number) else each for due, each in pairs)


_known: dict[Any, Known] = {}


def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator that has tensors of the device among its arguments, or is to make one."""
    known = _known.get(op)
    if known is None:
        known = _known[op] = Known(op)
    if known.view:  # the CPU's, which look at no memory
        return op._op_dk(CPU, *args, **kwargs)
    if known.name == "_fused_sdp_choice":
        return 0  # plain arithmetic
    found = tensors((*args, *kwargs.values()))
    if known.numbers(args):
        args = known.with_tensors(args, found)
    index = _device_of(known.name, found)
    if "device" in kwargs:
        asked, kwargs["device"] = kwargs["device"], torch.device("cpu")
        kwargs.pop("pin_memory", None)
        index = number(asked) if index is None else index
    assert index is not None, known.name
    if known.draws and kwargs.get("generator") is None:
        kwargs["generator"] = generators[index].next()
    return run(known, index, args, kwargs, _waits(known.name, args, found))


def run(known: Known, index: int, args: Sequence[Any], kwargs: dict[str, Any], why: str = "") -> Any:
    """Run an operator at once, or behind what is queued on the device's current stream.

    Args:
        known: the operator.
        index: the device.
        args: its arguments.
        kwargs: its arguments by name.
        why: the host has to wait for the device first, and this is the reason.
    """
    lane = lane_of(index)
    if why:
        count_wait(why)
        lane.drain()
    elif lane.busy or settings.queued:
        shapes = _shapes(known, args, kwargs)
        if shapes is not None:
            return _queue(known, index, args, kwargs, shapes[0])
        without_shapes.add(known.name)
        lane.drain()
    elif lane.error is not None:
        lane.check()
    return _now(known, index, args, kwargs)


def _device_of(name: str, found: list[Tensor]) -> int | None:
    """The one device of these tensors; CPU scalars may be among them, as with CUDA."""
    index = None
    strict = name not in MIXED
    for each in found:
        if on_it(each):
            if index is None:
                index = each.device.index
            elif each.device.index != index and strict:
                raise _mixed(name, index, each)
    if index is not None and strict:
        for position, each in enumerate(found):
            if not on_it(each) and (each.dim() or not position):
                raise _mixed(name, index, each)
    return index


def _mixed(name: str, index: int, other: Tensor) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:{index} and "
        f"{other.device}! (when checking arguments of aten::{name})"
    )


def _waits(name: str, args: Sequence[Any], found: list[Tensor]) -> str:
    """Why the host has to wait for this operator, or nothing."""
    if name in WAITING:
        return name
    if name == "_foreach_copy_" and any(not on_it(each) for each in args[0]):
        return "copy to the cpu"
    return ""


# -- at once -------------------------------------------------------------------------------------------------


def _now(known: Known, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def pair(made: Tensor, tensor: Tensor) -> Tensor:
        pairs[id(made)] = made, tensor
        return made

    def near(tensor: Tensor) -> Tensor:
        return pair(on_host(tensor), tensor) if on_it(tensor) else tensor

    def far(tensor: Tensor) -> Tensor:
        known_one = pairs.get(id(tensor))
        return on_device(tensor, index) if known_one is None else known_one[1]

    def fresh(tensor: Tensor) -> Tensor:
        """For an output, which may change its size: memory of DLPack cannot."""
        return pair(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype), tensor)

    options = {name: mapped(value, fresh if name in known.outs else near) for name, value in kwargs.items()}
    results = known.call(*mapped(args, near), **options)
    for name in known.outs:
        made, tensor = options[name], kwargs[name]
        if made.shape != tensor.shape or made.stride() != tensor.stride():
            place(tensor, on_device(made, index))
        else:
            on_host(tensor).copy_(made)
    return mapped(results, far)


# -- queued --------------------------------------------------------------------------------------------------


def _shapes(known: Known, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """The results' shapes, of torch's meta device; None: torch cannot tell them."""
    if known.writes and not known.outs:
        return (None,)

    def meta(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    options = mapped_values(kwargs, meta)
    if known.draws:
        options["generator"] = None
    if "device" in options:
        options["device"] = torch.device("meta")
    try:
        made = known.call(*mapped(args, meta), **options)
    except (NotImplementedError, RuntimeError):
        return None
    if known.name in NORMS and args[0].dtype in (torch.bfloat16, torch.float16):
        wide = any(each.dtype != args[0].dtype for each in tensors(args[1:5]))  # meta has statistics as CUDA has them
        made = (made[0], *(each.to(torch.float32 if wide else args[0].dtype) for each in made[1:]))
    for name in known.outs:  # what changes its size cannot be written later
        if options[name].shape != kwargs[name].shape:
            return None
    return (made,)


def _queue(known: Known, index: int, args: Sequence[Any], kwargs: dict[str, Any], shapes: Any) -> Any:
    """Queue an operator: its results are there at once, and filled later."""

    def near(tensor: Tensor) -> Tensor:
        return on_host(tensor) if on_it(tensor) else tensor.clone()

    inner, options = mapped(args, near), mapped_values(kwargs, near)
    if known.writes:  # what it writes is what it returns
        lane_of(index).put(lambda: known.call(*inner, **options))
        named = {**dict(zip(known.names, args, strict=False)), **kwargs}
        written = tuple(named[each] for each in known.writes)[: known.returns]
        return None if not known.returns else written[0] if known.returns == 1 else written
    host = mapped(shapes, lambda shape: torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype))
    results = mapped(host, lambda each: on_device(each, index))

    def fill() -> None:
        for there, value in zip(leaves(host), leaves(known.call(*inner, **options)), strict=True):
            # a result that nobody asked for is None on the CPU, or empty, as the statistics of evaluation
            if isinstance(there, Tensor) and isinstance(value, Tensor) and value.numel():
                there.copy_(value)

    lane_of(index).put(fill)
    return results


# -- collections of tensors ----------------------------------------------------------------------------------


def leaves(value: Any) -> list[Any]:
    """What nested lists and tuples hold, in order."""
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, list | tuple) else [value]


def mapped_values(values: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same for the values of a dict."""
    return {name: mapped(value, change) for name, value in values.items()}
