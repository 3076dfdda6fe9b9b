"""Sees every optimizer step: gradients before it, parameters after it, and what gradients are made of."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.verify.float64 import widen_in_place
from lockstep.verify.forwards import Forwards, plain
from lockstep.verify.settings import location, stack
from lockstep.verify.watch import Stop, Watch, put

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
        self._rates = [] if not watch.settings.is_replay else _recorded_rates(watch)
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
            if parameter.requires_grad and parameter.is_leaf and not hasattr(parameter, "placements"):
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
        off = "clipping" in self.watch.settings.overrides
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip: Callable[..., Any] = getattr(home, name)

            @functools.wraps(clip)
            def clipped(
                parameters: Any, bound: float, *args: Any, clip: Callable[..., Any] = clip, **kwargs: Any
            ) -> Any:
                parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
                if off:
                    bound = float("inf")
                self._save("unclipped", self._gradients(parameters))
                norm = clip(parameters, bound, *args, **kwargs)
                told = float(_local(norm)) if isinstance(norm, Tensor) else None
                self.watch.journal.note(
                    "clipped", update=self.watch.updates, bound=float(bound), norm=told, where=location()
                )
                return norm

            put(home, name, clipped)
            put(nn.utils, name, clipped)

    def _see_schedulers(self) -> None:
        from torch.optim import lr_scheduler

        for kind in {each for each in vars(lr_scheduler).values() if isinstance(each, type)}:
            step = vars(kind).get("step")
            if step is None:
                continue

            @functools.wraps(step)
            def stepped(scheduler: Any, *args: Any, step: Callable[..., Any] = step, **kwargs: Any) -> Any:
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
            self._save("first", {self._keys[id(p)]: _described(p.detach()) for p in parameters}, number)
        self._own_rates = [_number(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self._force_rates(optimizer, self._own_rates)
        if not _has_closure(args, kwargs):
            self._note(optimizer, parameters, closure=False)

    def _note(self, optimizer: Optimizer, parameters: list[Tensor], closure: bool) -> None:
        """Note a step, what it trains, and by which gradients: those of a closure are known behind its last call."""
        number, names = self._numbers[id(optimizer)], self.forwards.names()
        if self.watch.updates == 0 and any(_is_sharded_data_parallel(root) for root in self.forwards.roots):
            self.watch.journal.note("sharded data parallel")
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
        self._save("parameters", {self._keys[id(p)]: _described(p.detach()) for p in parameters})
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
            self._take_over(f"first-{number}", (p for p, key in self._of(number)))

    def _share_out(self) -> None:
        """Have each rank begin with its share of parameters that are to be counted once."""
        for override in self.watch.settings.overrides:
            for parameter in self._parameters:
                if override == f"once {self._keys[id(parameter)]}":
                    parameter.data.div_(self.watch.settings.world)

    def _of(self, number: int) -> list[tuple[Tensor, str]]:
        return [(p, self._keys[id(p)]) for p in self._parameters if self._keys[id(p)].startswith(f"{number}.")]

    def _take_over(self, what: str, parameters: Iterable[Tensor]) -> None:
        """Copy what rank 0 has written down into parameters of the same shapes."""
        path = Path(self.watch.settings.folder_of_ranks) / "rank-0" / f"{what}.pt"
        found = torch.load(path) if path.exists() else {}
        with torch.no_grad():
            for parameter in parameters:
                key = self._keys[id(parameter)]
                value = None if f"once {key}" in self.watch.settings.overrides else found.get(key)
                if isinstance(value, Tensor) and type(parameter.data) is Tensor and value.shape == parameter.shape:
                    parameter.data.copy_(value)

    def _steps(self) -> int:
        """The steps of the busiest optimizer; as long as another has made none, not all of them."""
        most, fewest = max(self._made.values()), min(self._made.values())
        enough = self.watch.settings.steps
        return most if fewest or most >= 5 * enough else min(most, enough - 1)

    # -- what is written down

    def _gradients(self, parameters: Iterable[Tensor]) -> dict[str, Any]:
        return {
            self._keys[id(p)]: None if p.grad is None else _described(p.grad.detach())
            for p in parameters
            if id(p) in self._keys
        }

    def _buffers(self) -> dict[str, Tensor]:
        several = len(self.forwards.roots) > 1
        found = {}
        for number, root in enumerate(self.forwards.roots):
            prefix = f"{type(root).__name__}-{number}." if several else ""
            for name, buffer in root.named_buffers():
                if not hasattr(buffer, "placements"):
                    found[prefix + plain(name)] = buffer.detach()
        return found

    def _save(self, what: str, tensors: dict[str, Any], number: int | None = None) -> None:
        number = self.watch.updates if number is None else number
        torch.save(tensors, self.watch.journal.folder / f"{what}-{number}.pt")


def strided_sums(gradient: Tensor) -> Tensor:
    """A gradient as a few sums over its elements: linear, so that sums of gradients have the sums of these."""
    flat = gradient.detach()
    flat = (flat.to_dense() if flat.layout != torch.strided else flat).reshape(-1).double()
    missing = -len(flat) % STRIDE
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, STRIDE).sum(0)


def _parameters(owner: Any) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _is_sharded_data_parallel(root: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in root.modules())


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _number(value: Any) -> float:
    return float(value)


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _described(tensor: Any) -> Any:
    """A tensor, dense; of one that is sharded this rank's part, with the place where that lies in the whole."""
    if not hasattr(tensor, "placements"):
        return tensor.to_dense() if tensor.layout != torch.strided else tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"part": tensor.to_local(), "offset": tuple(offset), "shape": tuple(tensor.shape), "own": tuple(shape)}


def _recorded_rates(watch: Watch) -> list[list[float]]:
    """The learning rates of the ranks, by update."""
    rates = []
    with open(watch.settings.folder_of_ranks / "rank-0" / "events.jsonl") as events:
        for line in events:
            event = json.loads(line)
            if event["kind"] == "step":
                rates.append(event["rates"])
    return rates
