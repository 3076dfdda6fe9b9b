"""What calls on a CUDA device become where torch's own distributed tests, written for GPUs, are run on CPU ranks.

Each rank's device is the CPU. Device arguments are rewritten where torch is called (``device=0``, ``.to(rank)``,
``.cuda()``); streams and events do nothing, since a CPU works in order; autocast and GradScaler are those
of the CPU; ``nn.SyncBatchNorm``, which torch refuses off the GPU, is lockstep's.
"""

from __future__ import annotations

import contextlib
import os
import types
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep.engines.ddp.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

CPU = torch.device("cpu")


def to_cpu(device: Any) -> Any:
    """``device`` if it is none of CUDA's, else the CPU."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, torch.device) and device.type == "cuda"):
        return CPU
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return CPU
    return device


class OnTheCPU(TorchFunctionMode):
    """Rewrites the device arguments of all calls to torch in its context."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": to_cpu(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], to_cpu(args[1]), *args[2:])
        elif func is torch._C._nn._parse_to and args:
            args = (to_cpu(args[0]), *args[1:])
        return func(*args, **kwargs)


class Still:
    """A stream of a device that does everything at once and in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU
        self.device_index = 0

    def __enter__(self) -> Still:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing is under way that one could come after."""

    wait = synchronize = wait_event = wait_stream = record

    def record_event(self, event: Any = None) -> Still:
        return event or Still()

    def query(self) -> bool:
        return True


class StillOfCuda(Still):
    """The same as ``torch.cuda.Stream``; torch.compile wants the two told apart."""


class Moment(Still):
    """An event of such a device."""


class MomentOfCuda(Still):
    """The same as ``torch.cuda.Event``."""


def without_devices(cls: type[nn.Module], made: list[str], arguments: dict[str, Any]) -> Callable[..., None]:
    """The constructor of ``cls`` for a module on the CPU, which has no device to be named; it notes each call."""
    constructor = cls.__init__

    @wraps(constructor)
    def __init__(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        made.append(type(module).__name__)
        constructor(self, module, None, None, *args, **arguments, **kwargs)

    return __init__


def as_the_file_sees_it() -> types.ModuleType:
    """``torch`` whose ``device`` makes CPU devices. (The true one is a type that all of torch compares with.)"""
    seen = types.ModuleType("torch")
    seen.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    seen.device = lambda *args: CPU if to_cpu(args[0]) is CPU else torch.device(*args)  # type: ignore[attr-defined]
    return seen


@contextlib.contextmanager
def mapped(
    file: types.ModuleType, candidate: type[nn.Module], shared_memory: bool | None = None
) -> Iterator[list[str]]:
    """Runs tests of ``file`` on the CPU, with ``candidate`` as torch's DistributedDataParallel; notes those made."""
    arguments = {} if shared_memory is None else {"shared_memory": shared_memory}
    made: list[str] = []
    world = int(os.environ["WORLD_SIZE"])

    with contextlib.ExitStack() as stack:

        def put(thing: Any, **names: Any) -> None:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(thing, name, value))

        put(
            torch.cuda,
            device_count=lambda: world,
            current_device=lambda: dist.get_rank() if dist.is_initialized() else 0,
            set_device=lambda device: None,
            synchronize=lambda device=None: None,
            manual_seed=lambda seed: None,
            Stream=StillOfCuda,
            Event=MomentOfCuda,
            stream=lambda stream: contextlib.nullcontext(stream),
            current_stream=lambda device=None: StillOfCuda(),
        )
        put(torch, Stream=Still, Event=Moment)
        put(torch.accelerator, current_stream=lambda device=None: Still())
        its_names = {
            "torch": as_the_file_sees_it(),
            "autocast": lambda *args, **kwargs: torch.autocast("cpu", torch.bfloat16),
            "GradScaler": lambda *args, **kwargs: torch.amp.GradScaler("cpu"),
            "DistributedDataParallel": candidate,
        }
        put(file, **{name: value for name, value in its_names.items() if hasattr(file, name)})
        put(nn, SyncBatchNorm=SyncBatchNorm)
        converter = mock.patch.object(
            SyncBatchNorm, "convert_sync_batchnorm", staticmethod(convert_sync_batchnorm), create=True
        )
        stack.enter_context(converter)
        put(nn.parallel, DistributedDataParallel=candidate)
        put(nn.parallel.distributed, DistributedDataParallel=candidate)
        put(candidate, __init__=without_devices(candidate, made, arguments))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(OnTheCPU())
        yield made
