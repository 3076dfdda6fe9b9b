"""``torch.madeup``: what users and torch ask of a device's module, as they ask it of ``torch.cuda``."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.accelerator.madeup import memory, queues
from tests.accelerator.madeup.memory import Memory
from tests.accelerator.madeup.numbers import generators
from tests.accelerator.madeup.queues import Event, Stream, current, number
from tests.accelerator.madeup.settings import NAME, settings


class Module:
    """The functions of ``torch.madeup``."""

    Stream, Event = Stream, Event
    __name__ = f"torch.{NAME}"

    # -- devices

    def is_available(self) -> bool:
        return settings.count > 0

    def is_initialized(self) -> bool:
        return memory.initialized()

    def _is_in_bad_fork(self) -> bool:
        return memory.in_bad_fork()

    def init(self) -> None: ...

    _lazy_init = init

    def device_count(self) -> int:
        return settings.count

    def current_device(self) -> int:
        return current.device

    def set_device(self, device: Any) -> None:
        current.device = number(device)

    def get_device_name(self, device: Any = None) -> str:
        return f"made-up device {number(device)}"

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._exchange_device(number(device))
        try:
            yield
        finally:
            current.device = before

    def _exchange_device(self, index: int) -> int:
        before = current.device
        current.device = before if index < 0 else index
        return before

    _maybe_exchange_device = _exchange_device

    def synchronize(self, device: Any = None) -> None:
        queues.synchronize(device)

    def set_sync_debug_mode(self, mode: str) -> None:
        queues.debug_mode = mode

    # -- streams

    def current_stream(self, device: Any = None) -> Stream:
        return current.stream(number(device))

    def default_stream(self, device: Any = None) -> Stream:
        return queues.default_stream(number(device))

    def stream(self, stream: Stream | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else stream

    def set_stream(self, stream: Stream) -> None:
        current.device = stream.device.index
        current.streams[stream.device.index] = stream

    # -- autocast

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    # -- random numbers

    def manual_seed(self, seed: int) -> None:
        generators[current.device].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def seed_all(self) -> None:
        self.manual_seed_all(torch.Generator().seed())

    def initial_seed(self) -> int:
        return generators[current.device].seed

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return generators[number(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        generators[number(device)].set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [generator.get_state() for generator in generators[: settings.count]]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    # -- memory

    def _memory(self, device: Any) -> Memory:
        return memory.memory[number(device)]

    def memory_allocated(self, device: Any = None) -> int:
        return self._memory(device).now

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._memory(device).most

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._memory(device).reset()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return settings.memory - self._memory(device).now, settings.memory

    def memory_stats(self, device: Any = None) -> OrderedDict[str, Any]:
        counted = self._memory(device)
        names = ("allocated_bytes", "reserved_bytes", "active_bytes")
        return OrderedDict(
            (f"{name}.all.{what}", value)
            for name in names
            for what, value in (("current", counted.now), ("peak", counted.most))
        )

    def empty_cache(self) -> None: ...


module = Module()
