"""What torch has for devices written in C++, and not for those written in Python: put in place here, by name.

Each of them is something that an out-of-tree device has from its C++ part (a guard, an allocator, hooks).
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

from tests.accelerator.madeup import memory
from tests.accelerator.madeup.memory import on_device, on_it
from tests.accelerator.madeup.module import module
from tests.accelerator.madeup.settings import NAME

_data: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]
_to: Any = Tensor.to


def numbered(value: Any) -> Any:
    """The device "madeup" with the number of the current one: the guard of a Python backend says 0."""
    if value == NAME or (isinstance(value, torch.device) and value.type == NAME and value.index is None):
        return torch.device(NAME, module.current_device())
    return value


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``Tensor.to``."""
    made: Tensor = _to(tensor, *map(numbered, args), **{name: numbered(value) for name, value in kwargs.items()})
    return made


def set_data(tensor: Tensor, other: Tensor) -> None:
    """``tensor.data = other``: to another device it goes by an exchange of the whole tensor."""
    if on_it(tensor) == on_it(other):
        _data.__set__(tensor, other)
        return
    grad = tensor.grad if tensor.is_leaf else None
    made = other.detach().requires_grad_(tensor.requires_grad)
    if grad is not None:
        made.grad = grad.to(made.device)
    hooks = {name: getattr(tensor, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    torch._C._swap_tensor_impl(tensor, made)
    for name, registered in hooks.items():  # Python has them still, and autograd is to know them again
        if registered:
            setattr(tensor, name, registered)


def compatible(input: Tensor, from_: Tensor) -> bool:
    """``torch._has_compatible_shallow_copy_type``: `Module.to` sets the parameters' ``data``; they stay themselves.

    Those without memory are replaced, as they are on every device.
    """
    return input.is_meta == from_.is_meta


# torch's compiler compares the signature with its own, whose annotations are types
compatible.__annotations__ = {"input": Tensor, "from_": Tensor, "return": bool}


def restored(storage: Any, location: str) -> Any:
    """A storage that `torch.load` has read, on the device that it was saved from."""
    kind, _, index = location.partition(":")
    if kind != NAME:
        return None
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return on_device(flat.clone(), int(index) if index else module.current_device()).untyped_storage()


def pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function as `torch.empty` that knows ``pin_memory=True``."""

    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return memory.pinned(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

    return made


class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
    """What torch's C++ asks for the kind of device, also while it leaves a function because of an exception.

    An exception of a hook in a backward is then still set in the interpreter, in which state no call of Python returns;
    torch would end the process. So it is taken out here, and raised by `in_this_thread`.
    """

    def type_(self) -> Any:
        try:
            _look()
        except BaseException as error:
            _taken.append(error)
        return torch._C._autograd.DeviceType.PrivateUse1


_look = ctypes.pythonapi.Py_IsInitialized  # ctypes raises what is set in the interpreter, after any such call
_taken: list[BaseException] = []


def in_this_thread(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd's engine without its threads, which know one number of a Python backend's devices."""

    @functools.wraps(backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return backward(*args, **kwargs)
        except SystemError as error:
            if not _taken:
                raise
            first = _taken[0]
            _taken.clear()
            raise first from error.__cause__

    return run


_new_storage: Any = torch.UntypedStorage.__new__


def new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``UntypedStorage(size, device="madeup")``, for which torch asks the device's allocator."""
    if device is None or torch.device(device).type != NAME:
        return (
            _new_storage(cls, *args, **kwargs) if device is None else _new_storage(cls, *args, device=device, **kwargs)
        )
    return torch.empty(args[0], dtype=torch.uint8, device=device).untyped_storage()


def followers(known: Callable[[], set[Any]], makers: list[Any]) -> Callable[[], set[Any]]:
    """The functions that make their tensors on the device of ``with torch.device(...)``, also of `pinning`."""
    return functools.cache(lambda: {*known(), *makers})


def found_builtin(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """How `torch.jit` finds the operator of a function of torch, for those of `pinning`, too."""
    return lambda function: find(getattr(function, "__wrapped__", function))


def _stats(index: int) -> dict[str, Any]:
    """As torch's C++ has them: `torch.accelerator.memory_stats` makes names of nested dicts."""
    nested: dict[str, Any] = {}
    for name, value in module.memory_stats(index).items():
        inner = nested
        *path, last = name.split(".")
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return OrderedDict(nested)


def apply() -> None:
    """Put all of them in place."""
    Tensor.to = to  # type: ignore[method-assign,assignment]
    torch.nn.parameter.UninitializedTensorMixin._allowed_methods.append(to)  # lazy layers, too, move
    Tensor.data = property(_data.__get__, set_data)  # type: ignore[assignment,method-assign]
    torch._has_compatible_shallow_copy_type = compatible
    storage: Any = torch.UntypedStorage
    storage.resize_, storage.size, storage.nbytes = memory.resize_storage, memory.storage_size, memory.storage_nbytes
    Tensor.is_pinned = lambda tensor, device=None: memory.is_pinned(tensor)  # type: ignore[method-assign]
    storage.__new__ = new_storage
    makers = [torch.empty, torch.empty_like, torch.empty_strided, torch.zeros, torch.zeros_like]
    _device._device_constructors = followers(_device._device_constructors, makers)
    for make in makers:
        setattr(torch, make.__name__, pinning(make))
    torch.jit._builtins._find_builtin = found_builtin(torch.jit._builtins._find_builtin)
    torch.serialization.register_package(1, lambda _: None, restored)
    run = in_this_thread(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    generic = {
        "getDeviceIndex": module.current_device,
        "setDeviceIndex": lambda index: None if index < 0 else module.set_device(index),
        "exchangeDevice": module._exchange_device,
        "maybeExchangeDevice": module._exchange_device,
        "getStream": module.current_stream,
        "setStream": module.set_stream,
        "synchronizeDevice": module.synchronize,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": module.empty_cache,
        "getDeviceStats": _stats,
        "resetPeakStats": module.reset_peak_memory_stats,
        "getMemoryInfo": module.mem_get_info,
    }
    for name, function in generic.items():
        setattr(torch._C, f"_accelerator_{name}", function)
