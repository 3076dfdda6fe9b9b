"""Sees every optimizer step: gradients before it, parameters after it, and what gradients are made of."""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.extensions.verify.compare import aligned
from lockstep.extensions.verify.float64 import widen_in_place
from lockstep.extensions.verify.forwards import Forwards, plain
from lockstep.extensions.verify.recordings import TensorPart, Value
from lockstep.extensions.verify.settings import location, stack
from lockstep.extensions.verify.watch import Stop, Watch, put
from lockstep.ground.parameters import begins_of

FOLLOW = "parameters of the ranks"
"""The override by which one process takes over rank 0's parameters behind each step."""
STRIDE = 13
"""A gradient is summed up in so many numbers, to see of which micro-batches it is made: a prime, no layer's size."""


class Steps:
    """Watches optimizers.

    Args:
        watch: of this process.
        forwards: knows the models.
    """

    def __init__(self, watch: Watch, forwards: Forwards) -> None:
        self.watch = watch
        self.forwards = forwards
        self._numbers: dict[int, int] = {}  # id of an optimizer -> its number, in the order in which they are made
        self._keys: dict[int, str] = {}  # id of a parameter -> "optimizer.position"
        self._own: dict[int, dict[int, Tensor]] = {}  # id of a parameter -> backward -> sums of its gradient there
        self._made: dict[int, int] = {}  # steps of each optimizer
        self._parameters: list[Tensor] = []
        self._depth = 0
        self._backwards = 0  # that were counted before the newest update
        self._rates: list[list[float]] = [event["rates"] for event in watch.of_rank_0("step")]
        self._own_rates: list[float] = []  # of the step that is being made

    def install(self) -> None:
        """Put the hooks into torch."""
        add = Optimizer.add_param_group

        @functools.wraps(add)
        def added(optimizer: Optimizer, group: dict[str, Any]) -> None:
            add(optimizer, group)
            self._see(optimizer)

        put(Optimizer, "add_param_group", added)
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        for kind in (Optimizer, nn.Module):
            self._see_zeroing(kind)
        self._see_clipping()
        self._see_schedulers()
        self.watch.on_training = self._start_alike if self.watch.settings.is_replay else self._share_out

    def _see(self, optimizer: Optimizer) -> None:
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        self._made.setdefault(number, 0)
        position = sum(1 for key in self._keys.values() if key.startswith(f"{number}."))
        for parameter in optimizer.param_groups[-1]["params"]:
            if self.watch.settings.float64:
                widen_in_place(parameter)
            if id(parameter) in self._own:
                continue
            self._keys[id(parameter)] = f"{number}.{position}"
            position += 1
            self._own[id(parameter)] = {}
            self._parameters.append(parameter)
            if parameter.requires_grad and parameter.is_leaf and not _is_sharded(parameter):
                parameter.register_hook(functools.partial(self._accumulate, parameter))

    def _accumulate(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add what a backward gives a parameter on this rank, before any synchronization."""
        own = self._own[id(parameter)]
        if parameter.grad is None:
            own.clear()
        number = self._backwards + self.watch.backwards
        sums = strided_sums(gradient)
        own[number] = own[number] + sums if number in own else sums

    def _see_zeroing(self, kind: type[Optimizer] | type[nn.Module]) -> None:
        zero_grad = kind.zero_grad

        @functools.wraps(zero_grad)
        def zeroed(owner: Any, *args: Any, **kwargs: Any) -> None:
            zero_grad(owner, *args, **kwargs)
            for parameter in _parameters(owner):
                if id(parameter) in self._own:
                    self._own[id(parameter)].clear()

        put(kind, "zero_grad", zeroed)

    def _see_clipping(self) -> None:
        home = nn.utils.clip_grad
        for name, bound in (("clip_grad_norm_", "max_norm"), ("clip_grad_value_", "clip_value")):
            clipped = self._clipped(getattr(home, name), bound)
            put(home, name, clipped)
            put(nn.utils, name, clipped)

    def _clipped(self, clip: Callable[..., object], bound: str) -> Callable[..., object]:
        """A function of torch's that clips gradients; they are written down before it."""
        signature = inspect.signature(clip)
        off = "clipping" in self.watch.settings.overrides

        @functools.wraps(clip)
        def clipped(*args: Any, **kwargs: Any) -> object:
            given = signature.bind(*args, **kwargs).arguments
            parameters = given["parameters"]
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if off:
                given[bound] = math.inf
            self._save("unclipped", self._gradients(parameters))
            norm = clip(**{**given, "parameters": parameters})
            self.watch.journal.note(
                "clipped", update=self.watch.updates, bound=float(given[bound]), norm=_norm(norm), where=location()
            )
            return norm

        return clipped

    def _see_schedulers(self) -> None:
        from torch.optim import lr_scheduler

        for kind in {each for each in vars(lr_scheduler).values() if isinstance(each, type)}:
            step = vars(kind).get("step")
            if step is None:
                continue

            @functools.wraps(step)
            def stepped(scheduler: object, *args: Any, step: Callable[..., Any] = step, **kwargs: Any) -> Any:
                lines = stack()
                if self.watch.is_training and lines:
                    self.watch.journal.note("scheduled", update=self.watch.updates, where=lines[0], stack=lines)
                return step(scheduler, *args, **kwargs)

            put(kind, "step", stepped)

    # -- one step

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        number = self._numbers[id(optimizer)]
        if self._made[number] >= self.watch.settings.steps and self.watch.is_done:
            raise Stop
        self.watch.begin_training()
        parameters = list(_parameters(optimizer))
        if self._made[number] == 0:
            self._save("first", self._values(parameters), number)
        self._own_rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._force_rates(optimizer, self._own_rates)
        if not _has_closure(args, kwargs):
            self._note(optimizer, parameters, closure=False)

    def _note(self, optimizer: Optimizer, parameters: list[Tensor], closure: bool) -> None:
        """Note a step, what it trains, and by which gradients: those of a closure are known behind its last call."""
        number, names = self._numbers[id(optimizer)], self.forwards.names()
        self._save("gradients", self._gradients(parameters))
        self._save("sums", {self._keys[id(p)]: self._own[id(p)] for p in parameters})
        self.watch.journal.note(
            "step",
            update=self.watch.updates,
            optimizer=number,
            name=type(optimizer).__name__,
            number=self._made[number],
            rates=self._own_rates,
            backwards=self.watch.backwards,
            names={self._keys[id(p)]: names.get(id(p), f"parameter {self._keys[id(p)]}") for p in parameters},
            unknown=[self._keys[id(p)] for p in parameters if id(p) not in names],
            trainable=[self._keys[id(p)] for p in parameters if p.requires_grad],
            covered=[self._keys[id(p)] for p in parameters if id(p) in self.forwards.covered],
            unsaved=[name for name, _, persists in self._named_buffers() if not persists],
            closure=closure,
            where=location(),
        )

    def _force_rates(self, optimizer: Optimizer, rates: list[float]) -> None:
        """Train one process at the learning rates of the ranks: those are compared, and not what follows from them."""
        update = self.watch.updates
        if update >= len(self._rates) or len(self._rates[update]) != len(rates):
            return
        for group, rate, own in zip(optimizer.param_groups, self._rates[update], rates, strict=True):
            if rate != own:
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        number, parameters = self._numbers[id(optimizer)], list(_parameters(optimizer))
        if not self._depth and _has_closure(args, kwargs):
            self._note(optimizer, parameters, closure=True)
        self._made[number] += 1
        if self._depth:
            return
        self._save("parameters", self._values(parameters))
        self._save("buffers", self._buffers())
        for parameter in parameters:
            self._own[id(parameter)].clear()
        self._backwards += self.watch.backwards
        self.watch.backwards = 0
        self.watch.updates += 1
        self.watch.steps = self._steps()
        settings = self.watch.settings
        if settings.is_replay and (FOLLOW in settings.overrides or not settings.float64):
            self._take_over(f"parameters-{self.watch.updates - 1}", parameters)
        if settings.interrupt and self.watch.steps == settings.interrupt:
            os.kill(os.getpid(), signal.SIGTERM)

    def _start_alike(self) -> None:
        """Have one process begin with the parameters with which rank 0 began."""
        for number in self._made:
            own = [p for p in self._parameters if self._keys[id(p)].startswith(f"{number}.")]
            self._take_over(f"first-{number}", own)

    def _share_out(self) -> None:
        """Have each rank begin with its share of parameters that are to be counted once."""
        for override in self.watch.settings.overrides:
            for parameter in self._parameters:
                if override == f"once {self._keys[id(parameter)]}":
                    parameter.data.div_(self.watch.settings.world)

    def _take_over(self, what: str, parameters: Iterable[Tensor]) -> None:
        """Copy what ranks have written down into parameters: rank 0's values, or all ranks' parts put together."""
        ranks = sorted(self.watch.settings.folder_of_ranks.glob(f"rank-*/{what}.pt"))
        found: list[dict[str, Value]] = [torch.load(path, mmap=True) for path in ranks]
        for parameter in parameters:
            key = self._keys[id(parameter)]
            parts = [value for value in (values.get(key) for values in found) if isinstance(value, Tensor)]
            if not parts or type(parameter.data) is not Tensor:
                continue
            value = aligned(parts, parameter.detach())[0]
            if f"once {key}" in self.watch.settings.overrides:
                value = torch.stack(parts).sum(0)  # of which each rank has a share
            if value is not None and value.shape == parameter.shape:
                parameter.data.copy_(value)

    def _steps(self) -> int:
        """The steps of the busiest optimizer; as long as another has made none, not all of them."""
        most, fewest = max(self._made.values()), min(self._made.values())
        enough = self.watch.settings.steps
        return most if fewest or most >= 5 * enough else min(most, enough - 1)

    # -- what is written down

    def _values(self, parameters: Iterable[Tensor]) -> dict[str, Value]:
        return {self._keys[id(p)]: _described(p.detach()) for p in parameters}

    def _gradients(self, parameters: Iterable[Tensor]) -> dict[str, Value]:
        return {self._keys[id(p)]: _gradient(p) for p in parameters if id(p) in self._keys}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer.detach() for name, buffer, _ in self._named_buffers() if not _is_sharded(buffer)}

    def _named_buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """The buffers of all models by name, and whether a state dict has them."""
        several = len(self.forwards.roots) > 1
        for number, root in enumerate(self.forwards.roots):
            prefix = f"{type(root).__name__}-{number}." if several else ""
            for path, layer in root.named_modules():
                for own, buffer in layer._buffers.items():
                    if buffer is not None:
                        name = prefix + plain(f"{path}.{own}".lstrip("."))
                        yield name, buffer, own not in layer._non_persistent_buffers_set

    def _save(self, what: str, tensors: Mapping[str, object], number: int | None = None) -> None:
        number = self.watch.updates if number is None else number
        torch.save(dict(tensors), self.watch.journal.folder / f"{what}-{number}.pt")


def strided_sums(gradient: Tensor) -> Tensor:
    """A gradient as a few sums over its elements: linear, so that sums of gradients have the sums of these."""
    flat = dense(gradient.detach()).reshape(-1).double()
    missing = -len(flat) % STRIDE
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, STRIDE).sum(0)


def _parameters(owner: nn.Module | Optimizer) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _gradient(parameter: Tensor) -> Value:
    """A parameter's gradient; of one that is empty, as this rank's part of a sharded one may be, an empty one."""
    if not parameter.numel():
        return _described(parameter.detach())
    return None if parameter.grad is None else _described(parameter.grad.detach())


def _norm(norm: object) -> float:
    """What clipping has returned, as a number: by value it returns nothing."""
    if not isinstance(norm, Tensor):
        return math.nan
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(whole)


def _described(tensor: Tensor) -> Value:
    """A tensor, dense; of one that is sharded this rank's part, with the place where that lies in the whole."""
    if not _is_sharded(tensor):
        return dense(tensor)
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    part = tensor.to_local()
    return TensorPart(part=part, offset=tuple(begins_of(tensor)), shape=tuple(tensor.shape), own=tuple(part.shape))


def _is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: that is asked without the import of them."""
    return hasattr(tensor, "placements")


def dense(tensor: Tensor) -> Tensor:
    """A tensor with all of its zeros."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
