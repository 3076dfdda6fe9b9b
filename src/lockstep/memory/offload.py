"""An optimizer's states on the CPU: a part of them at a time is on the device, while the optimizer steps.

    offloaded = OffloadedStates(torch.optim.AdamW(model.parameters()), torch.device("cuda"))
    ...
    offloaded.optimizer.step()

The update is the optimizer's own, on the device, so that it has the same bits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.host_memory import HostMemory
from lockstep.ground.moving import has_pinned_memory
from lockstep.ground.streams import current_stream, has_streams, in_stream, new_stream

PART = 64 * 2**20
"""Bytes of parameters whose states are fetched together; a parameter is not cut."""
SMALL = 1024
"""Elements of a state that stays where it is, such as a count of steps."""

# -- copies --------------------------------------------------------------------------------------------------


class Copies:
    """Copies between the CPU and a device, made before the next line runs.

    Args:
        device: the one that is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def host(self, like: Tensor) -> Tensor:
        """Memory on the CPU for a copy of ``like``."""
        return torch.empty_like(like, device="cpu")

    def fetch(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Copies on the device; use them after `arrive`."""
        return [host.to(self.device, copy=True) for host in hosts]

    def arrive(self) -> None:
        """Let what is computed from now on see what the oldest `fetch` gave that has not arrived."""

    def put(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each second tensor, on the device, into the first one, once all that is asked for so far is computed."""
        for host, tensor in pairs:
            host.copy_(tensor)

    def wait(self, left: int = 0) -> None:
        """Wait until at most ``left`` calls of `put` are under way."""


class StreamCopies(Copies):
    """Copies between pinned memory and a device, in two streams beside that of the computation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._into, self._out = new_stream(device), new_stream(device)
        self._memory = HostMemory(device)
        self._coming: deque[tuple[Any, list[Tensor]]] = deque()
        self._going: deque[Any] = deque()

    def host(self, like: Tensor) -> Tensor:
        return self._memory.like(like)

    def fetch(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        with in_stream(self._into):
            tensors = [host.to(self.device, non_blocking=True) for host in hosts]
            self._coming.append((self._into.record_event(), tensors))
        return tensors

    def arrive(self) -> None:
        event, tensors = self._coming.popleft()
        stream = current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def put(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._out.wait_stream(current_stream(self.device))
        with in_stream(self._out):
            for host, tensor in pairs:
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._out)
            self._going.append(self._out.record_event())

    def wait(self, left: int = 0) -> None:
        while len(self._going) > left:
            self._going.popleft().synchronize()
        if not left:
            self._coming.clear()  # of a step that failed


# -- states --------------------------------------------------------------------------------------------------


_OWN = ("step", "load_state_dict")

Part = dict[int, list[Tensor]]
"""Parameters, by the number of their group."""


class OffloadedStates:
    """Keeps an optimizer's states on the CPU; from now on its ``step`` fetches them part by part.

    While one part is updated, the next one comes and the one before goes back: three parts at most are on the device.

    Args:
        optimizer: of torch's kind; each parameter's update depends on that parameter, its gradient, its state and its
            group. It may have states already.
        device: of its parameters.
        part: bytes of parameters whose states are fetched together.
        copies: makes the copies; None: what suits the device.

    Raises:
        ValueError: the optimizer works on all parameters together.

    Attributes:
        optimizer: the given one.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, part: int = PART, copies: Copies | None = None
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"the states of {type(optimizer).__name__} are not where those of torch's optimizers are")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS works on all parameters together, so that all of its state is needed at a time")
        self.optimizer = optimizer
        self._part = part
        self._copies = copies or (
            StreamCopies(device) if has_streams(device) and has_pinned_memory(device.type) else Copies(device)
        )
        self._hosts: dict[tuple[int, str], Tensor] = {}  # by the id of the parameter, and the state's name
        self._before = {name: vars(optimizer).get(name) for name in _OWN}
        self._load: Callable[[dict[str, Any]], None] = optimizer.load_state_dict
        optimizer.step = self._wrapped(optimizer.step)  # type: ignore[method-assign]
        optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        for one in self._parts(all_of_them=True):
            self._adopt(one)
            self._put(one)
        self._copies.wait()

    def detach(self) -> None:
        """Let the optimizer's methods be as they were; the states stay on the CPU."""
        for name, before in self._before.items():
            if before is None:
                vars(self.optimizer).pop(name, None)
            else:
                vars(self.optimizer)[name] = before

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's ``load_state_dict``, with a part of the states on the device at a time."""
        optimizer, saved = self.optimizer, state_dict
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        number_of = dict(zip(map(id, parameters), numbers, strict=True))
        done: dict[Tensor, Any] = {}
        self._load({**saved, "state": {}})
        for part in self._parts(all_of_them=True):
            own = [number_of[id(parameter)] for some in part.values() for parameter in some]
            self._load({**saved, "state": {n: saved["state"][n] for n in own if n in saved["state"]}})
            self._put(part)
            self._copies.wait(1)
            done.update(optimizer.state)
        self._copies.wait()
        optimizer.state.update(done)

    # -- a step

    def _wrapped(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            parts = self._parts()
            if parts:
                with self._hooks_once():
                    self._step(parts, lambda: own(**options))
            else:
                own(**options)
            return loss

        return MethodType(step, self.optimizer)  # as schedulers expect it, which wrap it, too

    def _step(self, parts: list[Part], update: Callable[[], object]) -> None:
        groups, copies = self.optimizer.param_groups, self._copies
        before = [dict(group) for group in groups]
        try:
            coming = self._fetch(parts[0])
            for number, part in enumerate(parts):
                here = coming
                if number + 1 < len(parts):
                    copies.wait(1)
                    coming = self._fetch(parts[number + 1])
                copies.arrive()
                for parameter, name, tensor in here:
                    self.optimizer.state[parameter][name] = tensor
                for index, parameters in part.items():
                    # what a group counts it counts once
                    groups[index].update({**before[index], "params": parameters})
                self.optimizer.param_groups = [groups[index] for index in part]
                update()
                self._put(part)
        finally:
            copies.wait()
            self.optimizer.param_groups = groups
            for group, old in zip(groups, before, strict=True):
                group["params"] = old["params"]

    @contextmanager
    def _hooks_once(self) -> Iterator[None]:
        """Inside, the optimizer's own hooks before and after steps do not run; they run around it."""
        optimizer: Any = self.optimizer
        first, last = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        for hook in [*first.values()]:
            hook(optimizer, (), {})
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            yield
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = first, last
        for hook in [*last.values()]:
            hook(optimizer, (), {})

    def _parts(self, all_of_them: bool = False) -> list[Part]:
        """The parameters that have a gradient, or all, in parts."""
        parts: list[Part] = []
        left = 0
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None and not all_of_them:
                    continue
                if not parts or parameter.nbytes > left:
                    parts.append({})
                    left = self._part
                left -= parameter.nbytes
                parts[-1].setdefault(index, []).append(parameter)
        return parts

    def _adopt(self, part: Part) -> None:
        """Take over states that are on the CPU already, as an earlier fit has left them."""
        for parameter in (parameter for parameters in part.values() for parameter in parameters):
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                here = isinstance(value, Tensor) and value.device.type == "cpu" != parameter.device.type
                if here and value.numel() >= SMALL:
                    state[name] = self._hosts[id(parameter), name] = self._copies.host(value).copy_(value)

    def _fetch(self, part: Part) -> list[tuple[Tensor, str, Tensor]]:
        away: list[tuple[Tensor, str, Tensor]] = []
        for parameter in (parameter for parameters in part.values() for parameter in parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if self._is_away(parameter, name, value):
                    away.append((parameter, name, value))
        tensors = self._copies.fetch([value for *_, value in away])
        return [(parameter, name, tensor) for (parameter, name, _), tensor in zip(away, tensors, strict=True)]

    def _put(self, part: Part) -> None:
        pairs = []
        for parameter in (parameter for parameters in part.values() for parameter in parameters):
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.numel() < SMALL or value.device != parameter.device:
                    continue
                if self._is_away(parameter, name, value):
                    continue
                key = id(parameter), name
                host = self._hosts.get(key)
                if host is None or host.shape != value.shape or host.dtype != value.dtype:
                    host = self._hosts[key] = self._copies.host(value)
                pairs.append((host, value))
                state[name] = host
        self._copies.put(pairs)

    def _is_away(self, parameter: Tensor, name: str, value: object) -> bool:
        return value is not None and value is self._hosts.get((id(parameter), name))
