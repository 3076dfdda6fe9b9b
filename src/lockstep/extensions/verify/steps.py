"""Observer of optimizers, which saves gradients and parameters at each step, and each backward's contribution."""

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

from lockstep.extensions.verify.compare import align
from lockstep.extensions.verify.float64 import widen_in_place
from lockstep.extensions.verify.forwards import Forwards, plain
from lockstep.extensions.verify.recordings import TensorPart, Value
from lockstep.extensions.verify.settings import call_lines, location, stack
from lockstep.extensions.verify.watch import Stop, Watch, patch
from lockstep.ground.parameters import starts_of

FOLLOW = "parameters of the ranks"
"""Override that makes one process copy rank 0's parameters after each step."""
STRIDE = 13
"""Number of sums that represent a gradient; a prime, so that the sizes of layers are rarely multiples."""


class _WatchedGroup(dict[str, Any]):
    """Parameter group of an optimizer that records the lines that set its learning rate."""

    watch: Watch  # of the class: optimizers are copied and pickled with their groups

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and self.get(key) != value:
            self.watch.journal.record("rate", update=self.watch.updates, where=call_lines(stack()))
        super().__setitem__(key, value)


class Steps:
    """Observer of optimizers and gradient clipping, which saves gradients and parameters at each step.

    Args:
        watch: state that this process's observers share.
        forwards: observer of the models.
    """

    def __init__(self, watch: Watch, forwards: Forwards) -> None:
        self.watch = watch
        self.forwards = forwards
        self._numbers: dict[int, int] = {}  # id of an optimizer -> its number, in the order of creation
        self._keys: dict[int, str] = {}  # id of a parameter -> "optimizer.position"
        self._own: dict[int, dict[int, Tensor]] = {}  # id of a parameter -> backward -> sums of its gradient there
        self._made: dict[int, int] = {}  # steps of each optimizer
        self._parameters: list[Tensor] = []
        self._depth = 0
        self._backwards = 0  # before the newest update
        self._ranks_rates: list[list[float]] = [event["rates"] for event in watch.events_of_rank_0("step")]
        self._own_rates: list[float] = []  # of the current step

    def install(self) -> None:
        """Register the observer's hooks on optimizers, and wrap torch's clipping functions and ``zero_grad``."""
        add = Optimizer.add_param_group

        # the constructor of every optimizer calls it
        @functools.wraps(add)
        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            add(optimizer, group)
            optimizer.param_groups[-1] = _WatchedGroup(optimizer.param_groups[-1])
            parameters = optimizer.param_groups[-1]["params"]
            self._register(optimizer, parameters)
            where, keys = call_lines(stack()), [self._keys[id(p)] for p in parameters]
            self.watch.journal.record("added", update=self.watch.updates, keys=keys, where=where)
            # weights that are created during training: one process would draw other random values for them
            if self.watch.is_training and self.watch.settings.is_replay:
                self._load_first_parameters(self._numbers[id(optimizer)])

        patch(Optimizer, "add_param_group", add_param_group)
        _WatchedGroup.watch = self.watch
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        for kind in (Optimizer, nn.Module):
            zero = kind.zero_grad

            @functools.wraps(zero)
            def zero_grad(owner: Any, *args: Any, zero: Callable[..., None] = zero, **kwargs: Any) -> None:
                zero(owner, *args, **kwargs)
                for parameter in _parameters(owner):
                    if id(parameter) in self._own:
                        self._own[id(parameter)].clear()

            patch(kind, "zero_grad", zero_grad)
        for name, bound in (("clip_grad_norm_", "max_norm"), ("clip_grad_value_", "clip_value")):
            clip = self._wrap_clipping(getattr(nn.utils.clip_grad, name), bound)
            patch(nn.utils.clip_grad, name, clip)
            patch(nn.utils, name, clip)
        self._watch_schedulers()
        if self.watch.settings.is_replay:
            self.watch.on_training_start = self._load_first_parameters

    def _register(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Assign keys to parameters of an optimizer that have none, and observe their gradients."""
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        self._made.setdefault(number, 0)
        position = sum(1 for key in self._keys.values() if key.startswith(f"{number}."))
        for parameter in parameters:
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
        """Add a gradient to the sums of the current backward. This hook runs before wrappers synchronize gradients."""
        own = self._own[id(parameter)]
        # set to None without zero_grad
        if parameter.grad is None:
            own.clear()
        number = self._backwards + self.watch.backwards
        sums = strided_sums(gradient)
        own[number] = own[number] + sums if number in own else sums

    def _wrap_clipping(self, clip: Callable[..., object], bound: str) -> Callable[..., object]:
        """Wrap a clipping function so that gradients are saved first. ``bound`` is the name of its limit argument."""
        signature = inspect.signature(clip)

        @functools.wraps(clip)
        def recorded(*args: Any, **kwargs: Any) -> object:
            arguments = signature.bind(*args, **kwargs).arguments
            parameters = arguments["parameters"]
            # an iterator could be used only once
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._save("unclipped", self._gradients(parameters))
            norm = clip(**{**arguments, "parameters": parameters})
            # clipping by value returns None
            total = math.nan
            if isinstance(norm, Tensor):
                total = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            limit, where = float(arguments[bound]), call_lines(stack())
            self.watch.journal.record("clipped", update=self.watch.updates, bound=limit, norm=total, where=where)
            return norm

        return recorded

    def _watch_schedulers(self) -> None:
        from torch.optim import lr_scheduler

        for kind in {each for each in vars(lr_scheduler).values() if isinstance(each, type)}:
            step = vars(kind).get("step")
            if step is None:
                continue

            @functools.wraps(step)
            def recorded(scheduler: object, *args: Any, step: Callable[..., Any] = step, **kwargs: Any) -> Any:
                lines, metric = stack(), None
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    metric = float(kwargs.get("metrics", args[0] if args else math.nan))
                # the constructor steps as well, before training
                if self.watch.is_training and lines:
                    at = self.watch.updates
                    self.watch.journal.record("scheduled", update=at, metric=metric, where=lines[0], stack=lines)
                return step(scheduler, *args, **kwargs)

            patch(kind, "step", recorded)

    # -- one step

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # an optimizer may step others inside its own step
        self._depth += 1
        if self._depth > 1:
            return
        self.watch.in_step = not _has_closure(args, kwargs)
        number = self._numbers[id(optimizer)]
        if self._is_over(number):
            # a step on the batch that was read ahead is not recorded, and evaluations follow it
            if not self.watch.drains:
                raise Stop
            return
        self.watch.start_training()
        parameters = list(_parameters(optimizer))
        # DeepSpeed puts its own parameters into the groups of an optimizer
        self._register(optimizer, parameters)
        if self._made[number] == 0:
            self._save("first", self._values(parameters), number)
        self._own_rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._use_rates_of_ranks(optimizer)
        # a closure makes the gradients within the step
        if not _has_closure(args, kwargs):
            self._record(optimizer, parameters, closure=False)

    def _is_over(self, number: int) -> bool:
        return self._made[number] >= self.watch.settings.steps and self.watch.is_done

    def _record(self, optimizer: Optimizer, parameters: list[Tensor], closure: bool) -> None:
        """Record an optimizer's step, and save the gradients of the step."""
        number, names = self._numbers[id(optimizer)], self.forwards.names()
        self._save("gradients", self._gradients(parameters))
        self._save("sums", {self._keys[id(p)]: self._own[id(p)] for p in parameters})
        self.watch.journal.record(
            "step",
            update=self.watch.updates,
            optimizer=number,
            name=type(optimizer).__name__,
            number=self._made[number],
            rates=self._own_rates,
            options=[_options(optimizer, group) for group in optimizer.param_groups],
            backwards=self.watch.backwards,
            names={self._keys[id(p)]: names.get(id(p), f"parameter {self._keys[id(p)]}") for p in parameters},
            unknown=[self._keys[id(p)] for p in parameters if id(p) not in names],
            trainable=[self._keys[id(p)] for p in parameters if p.requires_grad],
            covered=[self._keys[id(p)] for p in parameters if id(p) in self.forwards.covered],
            unsaved=[name for name, _, persists in self._named_buffers() if not persists],
            closure=closure,
            where=location(),
        )

    def _use_rates_of_ranks(self, optimizer: Optimizer) -> None:
        """In the single process, use the ranks' learning rates, because other rates would change all later values."""
        update, own = self.watch.updates, self._own_rates
        if update >= len(self._ranks_rates) or len(self._ranks_rates[update]) != len(own):
            return
        for group, rate, own_rate in zip(optimizer.param_groups, self._ranks_rates[update], own, strict=True):
            if rate != own_rate:
                # not by the group's own method, which would record this line
                dict.update(group, lr=torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        number, parameters = self._numbers[id(optimizer)], list(_parameters(optimizer))
        if not self._depth and self._is_over(number):
            self.watch.drains = False
            return
        if not self._depth and _has_closure(args, kwargs):
            self._record(optimizer, parameters, closure=True)
        self._made[number] += 1
        if self._depth:
            return
        self.watch.in_step = False
        self._save("parameters", self._values(parameters))
        buffers = {name: value.detach() for name, value, _ in self._named_buffers() if not _is_sharded(value)}
        self._save("buffers", buffers)
        for parameter in parameters:
            self._own[id(parameter)].clear()
        watch, settings = self.watch, self.watch.settings
        self._backwards += watch.backwards
        watch.backwards = 0
        watch.updates += 1
        most, fewest = max(self._made.values()), min(self._made.values())
        # while another optimizer has made none the steps are not complete, unless it seems to make none at all
        watch.steps = most if fewest or most >= 5 * settings.steps else min(most, settings.steps - 1)
        if settings.is_replay and (FOLLOW in settings.overrides or not settings.float64):
            self._take_over(f"parameters-{watch.updates - 1}", parameters)
        if settings.sigterm_after and watch.steps == settings.sigterm_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def _load_first_parameters(self, *numbers: int) -> None:
        """Load the ranks' initial parameters into the single process. ``numbers`` are optimizers; none: all."""
        for number in numbers or self._made:
            own = [p for p in self._parameters if self._keys[id(p)].startswith(f"{number}.")]
            self._take_over(f"first-{number}", own)

    def _take_over(self, file: str, parameters: Iterable[Tensor]) -> None:
        """Load the parameters that the ranks saved to ``file``. If each rank has a part, join the parts."""
        ranks = sorted(self.watch.settings.folder_of_ranks.glob(f"rank-*/{file}.pt"))
        found: list[dict[str, Value]] = [torch.load(path, mmap=True) for path in ranks]
        for parameter in parameters:
            key = self._keys[id(parameter)]
            parts = [value for value in (values.get(key) for values in found) if isinstance(value, Tensor)]
            if not parts or type(parameter.data) is not Tensor:
                continue
            value = align(parts, parameter.detach())[0]
            if value is not None and value.shape == parameter.shape:
                parameter.data.copy_(value)

    # -- what is written

    def _values(self, parameters: Iterable[Tensor]) -> dict[str, Value]:
        return {self._keys[id(p)]: _to_value(p.detach()) for p in parameters}

    def _gradients(self, parameters: Iterable[Tensor]) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for parameter in parameters:
            key = self._keys.get(id(parameter))
            if key is None:
                continue
            if not parameter.numel():
                # a rank's shard may be empty: its gradient is not missing, but empty
                found[key] = _to_value(parameter.detach())
            else:
                found[key] = None if parameter.grad is None else _to_value(parameter.grad.detach())
        return found

    def _named_buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield (name, buffer, True if the buffer is persistent) for the buffers of all models."""
        has_several = len(self.forwards.roots) > 1
        for number, root in enumerate(self.forwards.roots):
            prefix = f"{type(root).__name__}-{number}." if has_several else ""
            for path, layer in root.named_modules():
                for own, buffer in layer._buffers.items():
                    if buffer is not None:
                        name = prefix + plain(f"{path}.{own}".lstrip("."))
                        yield name, buffer, own not in layer._non_persistent_buffers_set

    def _save(self, what: str, tensors: Mapping[str, object], number: int | None = None) -> None:
        number = self.watch.updates if number is None else number
        torch.save(dict(tensors), self.watch.journal.folder / f"{what}-{number}.pt")


def strided_sums(gradient: Tensor) -> Tensor:
    """Return `STRIDE` sums of a gradient's elements, each over every `STRIDE`-th element, in float64.

    They are linear: the strided sums of a sum of gradients are the sum of the gradients' strided sums.
    """
    flat = dense(gradient.detach()).reshape(-1).double()
    missing = -len(flat) % STRIDE
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, STRIDE).sum(0)


def _options(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the class and options of an optimizer's group as text, without objects, whose text may have an address."""
    options = {name: str(value) for name, value in group.items() if isinstance(value, int | float | str | tuple)}
    return {"class": type(optimizer).__name__, **options}


def _parameters(owner: nn.Module | Optimizer) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _to_value(tensor: Tensor) -> Value:
    """Return a dense tensor, or this rank's shard of a DTensor with its offset in the full tensor."""
    if not _is_sharded(tensor):
        return dense(tensor)
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    part = tensor.to_local()
    return TensorPart(part=part, offset=tuple(starts_of(tensor)), shape=tuple(tensor.shape), own=tuple(part.shape))


def _is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor, without the slow import of `torch.distributed.tensor`."""
    return hasattr(tensor, "placements")


def dense(tensor: Tensor) -> Tensor:
    """Return a sparse tensor as a dense tensor, and a dense one unchanged."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
