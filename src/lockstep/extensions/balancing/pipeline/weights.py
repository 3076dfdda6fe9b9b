"""The weights of a model in stages: each rank's own on its devices, and all of them whole for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint.pretrained import Source, read_into
from lockstep.extensions.balancing.pipeline.layout import Ownership, StagePlacement
from lockstep.ground import comm
from lockstep.ground.parameters import plain_name

Gather = Callable[[object], list[Any]]


class WholeModule:
    """A module whose blocks are held by the ranks of a pipeline.

    Args:
        module: the same on all ranks.
        owned: who holds what.
        pipeline: the ranks.
        placement: on which device of this rank.

    Attributes:
        is_freed: whether the weights of others' blocks are not here, and those of this rank's own are on its devices.
    """

    def __init__(self, module: nn.Module, owned: Ownership, pipeline: comm.Group, placement: StagePlacement) -> None:
        self.module, self.owned, self.pipeline, self.placement = module, owned, pipeline, placement
        self.device = placement.root
        self.is_freed = False
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        # layers that move more than parameters and buffers, as torchmetrics do, and are on one device
        self._with_more = [
            (name, layer)
            for name, layer in module.named_modules()
            if type(layer)._apply is not nn.Module._apply and not owned.is_spread(f"{name}." if name else "")
        ]

    # -- where weights are

    def place(self) -> None:
        """Bring what this rank holds to its devices."""
        self._bring(self.placement.device_of, [])

    def _bring(self, device_of: Callable[[str], torch.device], optimizers: list[Optimizer]) -> None:
        """Bring what this rank holds to the devices that names have."""
        held = {id(parameter) for parameter in self.owned.held}
        for name, parameter in self._parameters.items():
            if id(parameter) in held:
                _bring(parameter, device_of(name), optimizers)
        for name, buffer in self.module.named_buffers():
            if self.owned.place in self.owned.holders_of(name):
                buffer.data = buffer.data.to(device_of(name))
        for name, layer in self._with_more:
            if self.owned.place in self.owned.holders_of(f"{name}."):
                layer.to(device_of(f"{name}."))

    def free(self, optimizers: list[Optimizer]) -> None:
        """Let go of the weights of others' blocks, and of what optimizers keep for them.

        In the place of values stands NaN, one for all: who uses them sees it.
        """
        for parameter in self.owned.freed:
            nothing = float("nan") if parameter.is_floating_point() else 0
            value = torch.full((), nothing, dtype=parameter.dtype, device=self.device)
            parameter.data = value.expand(parameter.shape)
            parameter.grad = None
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
        self.is_freed = True

    def read(self, sources: Mapping[int, Source]) -> None:
        """Read what this rank holds from a folder, by the parameters' ids; others' weights are not here then."""
        device_of = {id(parameter): self.placement.device_of(name) for name, parameter in self._parameters.items()}
        for parameter in self.owned.held:
            if id(parameter) in sources:
                device = device_of[id(parameter)]
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                read_into(parameter, sources[id(parameter)])
        self.free([])

    def change_owners(self, owned: Ownership, placement: StagePlacement, optimizers: list[Optimizer]) -> None:
        """Blocks have moved: what came is here, on its device with its states, and what went is let go of."""
        self.owned, self.placement = owned, placement
        self._bring(placement.device_of, optimizers)
        self.free(optimizers)

    def gather(self) -> None:
        """Let each rank have all weights and buffers again, those of others' blocks on the CPU. Collective.

        So are those of blocks that this rank had on another device than what is outside of the chain.
        """
        if self.is_freed:
            for parameter in self.owned.freed:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._bring(self._after_fit, [])
            self.is_freed = False
        state = dict(chain(self._parameters.items(), self.module.named_buffers()))
        for place in range(comm.world_size(self.pipeline)):
            theirs = [each.detach() for name, each in state.items() if self._owner(name) == place]
            comm.broadcast_tensors(theirs, place, self.pipeline, over=self.device)

    def _after_fit(self, name: str) -> torch.device:
        device = self.placement.device_of(name)
        return device if device == self.device else torch.device("cpu")

    def _owner(self, name: str) -> int:
        parameter = self._parameters.get(name)
        return self.owned.owner_of(name) if parameter is None else self.owned.owner(parameter)

    def align_buffers(self, peers: comm.Group) -> None:
        """Before a window: replica 0's buffers for all, and what is outside of the chain as the last stage has it."""
        named = dict(self.module.named_buffers())
        if peers is not None:
            own = [b for name, b in named.items() if self.owned.place in self.owned.holders_of(name)]
            comm.broadcast_tensors(own, 0, peers)
        comm.broadcast_tensors([named[name] for name in self.owned.outside_buffers], 0, self.pipeline)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Name, value and gradient of each parameter, on one device. Collective."""
        named = {plain_name(name): p for name, p in self.module.named_parameters()}
        there = torch.tensor([float(p.grad is not None) for p in named.values()], device=self.device)
        has_gradient = comm.all_reduce(there, "max", self.pipeline).tolist()
        for (name, parameter), has in zip(named.items(), has_gradient, strict=True):
            value = self._from_owner(parameter, parameter.detach())
            yield name, value, self._from_owner(parameter, parameter.grad) if has else None

    def _from_owner(self, parameter: Parameter, tensor: Tensor | None) -> Tensor:
        owner = self.owned.owner(parameter)
        if self.owned.place != owner:
            tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        assert tensor is not None
        tensor = tensor.to(self.device)
        comm.broadcast_tensors([tensor], owner, self.pipeline)
        return tensor

    # -- checkpoints

    def state_dict(self, sends: bool, gather: Gather) -> dict[str, Any]:
        """The module's whole state dict on rank 0; the others' has what they hold. Collective.

        Args:
            sends: this rank is of the replica whose values count.
            gather: brings objects to rank 0.
        """
        own = self.module.state_dict()
        mine = {name: _on_cpu(value) for name, value in own.items() if sends and self._owner(name) == self.owned.place}
        found: dict[str, Any] = {}
        for part in gather(mine) or [mine]:
            found.update(part)
        return {name: found[name] for name in own if name in found}

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        """Take what this rank holds.

        Raises:
            RuntimeError: ``strict``, and names are missing, or there are others; or shapes differ.
        """
        if not self.is_freed:
            self.module.load_state_dict(state, strict=strict)
            return
        freed = {id(parameter) for parameter in self.owned.freed}
        away = {name for name, parameter in self._parameters.items() if id(parameter) in freed}
        found = self.module.load_state_dict({n: value for n, value in state.items() if n not in away}, strict=False)
        missing = [name for name in found.missing_keys if name not in away or name not in state]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(f"missing: {missing}; unexpected: {found.unexpected_keys}")

    def optimizer_state(self, optimizer: Optimizer, sends: bool, gather: Gather) -> dict[str, Any]:
        """An optimizer's whole state on rank 0; the others' has what they hold. Collective."""
        own = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {
            key: _on_cpu(value)
            for key, value in own["state"].items()
            if sends and (not isinstance(key, int) or self.owned.owner(parameters[key]) == self.owned.place)
        }
        found: dict[Any, Any] = {}
        for part in gather(mine) or [mine]:
            found.update(part)
        return {**own, "state": dict(sorted(found.items(), key=lambda item: str(item[0]).zfill(12)))}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take of an optimizer's whole state what belongs to this rank's parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held = {id(parameter) for parameter in self.owned.held}
        own = {
            key: value
            for key, value in state["state"].items()
            if not isinstance(key, int) or key >= len(parameters) or id(parameters[key]) in held
        }
        optimizer.load_state_dict({**state, "state": own})


def _bring(parameter: Parameter, device: torch.device, optimizers: list[Optimizer]) -> None:
    """Bring a parameter to a device, with its gradient and with what optimizers keep where it was."""
    before = parameter.device
    if before == device:
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(device)
    parameter.grad = None if gradient is None else gradient.to(device)
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device == before:  # a count of steps is on the CPU
                state[key] = value.to(device)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return value
