"""The memory of the made-up device: tensors that share the host's, counted and limited by device; pinned memory.

How a tensor comes onto the device: the DLPack capsule of a tensor names its device in two numbers, and with others in
their place torch makes a tensor of another device of it, of the same memory. Such a tensor is a plain `torch.Tensor`
with a storage of its own. The tensor on the other side is called a twin here.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.accelerator.madeup import queues
from tests.accelerator.madeup.settings import NAME, settings

CPU = torch._C.DispatchKey.CPU

# -- twins ---------------------------------------------------------------------------------------------------

_HOST, _EXTENSION = 1, 12  # DLPack's kDLCPU and kDLExtDev, which torch reads as its PrivateUse1
_DEVICE_TYPE, _DEVICE_ID = 8, 12  # where they stand in a DLTensor, behind the pointer to the data

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_as_strided = torch.ops.aten.as_strided.default
_set = torch.ops.aten.set_.source_Storage_storage_offset


def _twin(tensor: Tensor, kind: int, index: int) -> Tensor:
    capsule = torch._C._to_dlpack(tensor)
    at = _pointer(capsule, b"dltensor") or 0
    ctypes.c_int32.from_address(at + _DEVICE_TYPE).value = kind
    ctypes.c_int32.from_address(at + _DEVICE_ID).value = index
    made: Tensor = torch._C._from_dlpack(capsule)
    if made.stride() != tensor.stride():  # DLPack writes 1 for a dimension of one element
        made = _as_strided._op_dk(CPU, made, tensor.size(), tensor.stride())
    return made


def on_host(tensor: Tensor) -> Tensor:
    """The twin on the CPU of a tensor of the device, whose memory may be said to be conjugated or negated."""
    if tensor.is_conj():
        return on_host(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(on_host(torch._neg_view(tensor)))
    return _twin(tensor, _HOST, 0)


def on_device(tensor: Tensor, index: int) -> Tensor:
    """The twin on a device of a tensor of the CPU, which takes that much of the device's memory."""
    if _in_bad_fork:
        raise RuntimeError(f"Cannot re-initialize {NAME} in forked subprocess. Use 'spawn' as the start method.")
    if not settings.float64 and tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"Cannot convert a {NAME} tensor to {tensor.dtype}: {NAME} does not have it. Use float32.")
    made = _twin(tensor, _EXTENSION, index)
    memory[index].take(made.untyped_storage())
    return made


def place(tensor: Tensor, other: Tensor) -> None:
    """Let a tensor of the device be what another one is: its memory, shape and strides."""
    storage = other.untyped_storage()
    _set._op_dk(CPU, tensor, storage, other.storage_offset(), other.size(), other.stride())


def on_it(tensor: Tensor) -> bool:
    """Whether a tensor lies on a made-up device."""
    return tensor.device.type == NAME


# -- counted -------------------------------------------------------------------------------------------------

_storage_resize: Any = torch.UntypedStorage.resize_
_storage_size: Any = torch.UntypedStorage.size
_storage_nbytes: Any = torch.UntypedStorage.nbytes


class Memory:
    """What the storages of one device take.

    Attributes:
        now: bytes.
        most: the largest ``now`` since `reset`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.now = self.most = self.taken = 0

    def take(self, storage: Any) -> None:
        """Count a storage until it is gone."""
        size = _storage_nbytes(storage)
        self.add(size)
        finalizer = weakref.finalize(storage, _give, self, size, held := [True])
        finalizer.atexit = False
        storage.__dict__["held"] = held

    def add(self, size: int) -> None:
        """Count so many bytes.

        Raises:
            torch.OutOfMemoryError: there are not so many left.
        """
        if self.now + size > settings.memory:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {size} bytes. Device {self.index} has a total capacity of "
                f"{settings.memory} bytes of which {settings.memory - self.now} bytes are free."
            )
        self.now += size
        self.most = max(self.most, self.now)
        self.taken += 1

    def reset(self) -> None:
        """Forget the peak."""
        self.most = self.now


def _give(memory: Memory, size: int, held: list[bool]) -> None:
    if held[0]:
        memory.now -= size


memory = [Memory(index) for index in range(settings.count)]


# FSDP frees a parameter's memory by `storage.resize_(0)` and takes it again. The memory is the host's, in fact, and
# stays: it is counted as given back, its size is said to be 0, and what was in it is lost.


def resize_storage(storage: Any, size: int) -> Any:
    """``UntypedStorage.resize_``, between nothing and all of it."""
    if storage.device.type != NAME:
        return _storage_resize(storage, size)
    whole, held = _storage_nbytes(storage), storage.__dict__["held"]
    if size not in (0, whole):
        raise NotImplementedError(f"{NAME}: a storage of {whole} bytes cannot have {size}")
    counted = memory[storage.device.index]
    if whole and held[0] != bool(size):
        if size:
            counted.add(whole)
        else:
            counted.now -= whole
        held[0] = bool(size)
    return storage


def storage_size(storage: Any) -> int:
    """``UntypedStorage.size``."""
    return 0 if _freed(storage) else _storage_size(storage)


def storage_nbytes(storage: Any) -> int:
    """``UntypedStorage.nbytes``."""
    return 0 if _freed(storage) else _storage_nbytes(storage)


def _freed(storage: Any) -> bool:
    held = storage.__dict__.get("held")
    return held is not None and not held[0]


# -- pinned ----------------------------------------------------------------------------------------------------

_pinned: dict[int, int] = {}


def pinned(tensor: Tensor) -> Tensor:
    """Mark the memory of a tensor of the CPU as pinned."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if address and address not in _pinned:
        _pinned[address] = 1
        weakref.finalize(storage, _pinned.pop, address, None).atexit = False
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor's memory is pinned."""
    return bool(_pinned) and not on_it(tensor) and tensor.untyped_storage().data_ptr() in _pinned


# -- forks -----------------------------------------------------------------------------------------------------

_in_bad_fork = False


def initialized() -> bool:
    """Whether this process has taken memory of a device."""
    return any(each.taken for each in memory)


def in_bad_fork() -> bool:
    """Whether this process was forked by one that had used the device, as CUDA minds."""
    return _in_bad_fork


def _after_fork() -> None:
    global _in_bad_fork
    _in_bad_fork = _in_bad_fork or initialized()
    queues.forget()


os.register_at_fork(after_in_child=_after_fork)
