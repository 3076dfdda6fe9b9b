"""Weights of a pipelined model: each rank's part on its devices, and the full model for checkpoints."""

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
    """Wrapper around a module whose blocks are stored by different ranks. It moves, frees and gathers weights.

    Args:
        module: the module, with the same parameter names on all ranks.
        owned: ranks that store each tensor.
        pipeline: group of the ranks.
        placement: devices of this rank's tensors.

    Attributes:
        is_freed: True if the weights of other ranks' blocks are freed, and this rank's are on its devices.
    """

    def __init__(self, module: nn.Module, owned: Ownership, pipeline: comm.Group, placement: StagePlacement) -> None:
        self.module, self.owned, self.pipeline, self.placement = module, owned, pipeline, placement
        self.device = placement.root
        self.is_freed = False
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        # layers such as torchmetrics' move more than parameters and buffers; those that are on one device are moved
        # as a whole
        self._with_more = [
            (name, layer)
            for name, layer in module.named_modules()
            if type(layer)._apply is not nn.Module._apply and not owned.is_spread(f"{name}." if name else "")
        ]

    # -- places of weights

    def place(self) -> None:
        """Move this rank's tensors to its devices."""
        self._bring(self.placement.device_of, [])

    def _bring(self, device_of: Callable[[str], torch.device], optimizers: list[Optimizer]) -> None:
        """Move this rank's tensors to the devices that ``device_of`` returns for their names."""
        local = {id(parameter) for parameter in self.owned.local}
        for name, parameter in self._parameters.items():
            if id(parameter) in local:
                _bring(parameter, device_of(name), optimizers)
        for name, buffer in self.module.named_buffers():
            if self.owned.place in self.owned.holders_of(name):
                buffer.data = buffer.data.to(device_of(name))
        for name, layer in self._with_more:
            if self.owned.place in self.owned.holders_of(f"{name}."):
                layer.to(device_of(f"{name}."))

    def free(self, optimizers: list[Optimizer]) -> None:
        """Free the weights of other ranks' blocks, and their optimizer states."""
        for parameter in self.owned.remote:
            # one expanded NaN keeps the shape without memory, and code that uses the parameter notices it
            nothing = float("nan") if parameter.is_floating_point() else 0
            value = torch.full((), nothing, dtype=parameter.dtype, device=self.device)
            parameter.data = value.expand(parameter.shape)
            parameter.grad = None
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
        self.is_freed = True

    def read(self, sources: Mapping[int, Source]) -> None:
        """Read this rank's parameters from their sources, and free the other ranks' parameters.

        Args:
            sources: sources of the values, by the parameters' ids.
        """
        device_of = {id(parameter): self.placement.device_of(name) for name, parameter in self._parameters.items()}
        for parameter in self.owned.local:
            if id(parameter) in sources:
                device = device_of[id(parameter)]
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                read_into(parameter, sources[id(parameter)])
        self.free([])

    def change_owners(self, owned: Ownership, placement: StagePlacement, optimizers: list[Optimizer]) -> None:
        """Apply a new placement: move received tensors to their devices, and free tensors of other ranks' blocks."""
        self.owned, self.placement = owned, placement
        self._bring(placement.device_of, optimizers)
        self.free(optimizers)

    def gather(self) -> None:
        """Restore all weights and buffers on each rank. Collective.

        Blocks of other ranks, and of other devices than the first of this process, are on the CPU afterwards.
        """
        if self.is_freed:
            for parameter in self.owned.remote:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._bring(self._device_after_fit, [])
            self.is_freed = False
        state = dict(chain(self._parameters.items(), self.module.named_buffers()))
        for place in range(comm.world_size(self.pipeline)):
            theirs = [each.detach() for name, each in state.items() if self._owner(name) == place]
            comm.broadcast_tensors(theirs, place, self.pipeline, over=self.device)

    def _device_after_fit(self, name: str) -> torch.device:
        device = self.placement.device_of(name)
        return device if device == self.device else torch.device("cpu")

    def _owner(self, name: str) -> int:
        parameter = self._parameters.get(name)
        return self.owned.owner_of(name) if parameter is None else self.owned.owner(parameter)

    def align_buffers(self, peers: comm.Group) -> None:
        """Copy replica 0's buffers to all replicas; in a pipeline, copy the last stage's buffers outside the chain."""
        named = dict(self.module.named_buffers())
        if peers is not None:
            own = [b for name, b in named.items() if self.owned.place in self.owned.holders_of(name)]
            comm.broadcast_tensors(own, 0, peers)
        comm.broadcast_tensors([named[name] for name in self.owned.outside_buffers], 0, self.pipeline)

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield (name, full value, full gradient) for each parameter, on the first device. Collective."""
        named = {plain_name(name): p for name, p in self.module.named_parameters()}
        # one message for all: ranks must agree on the broadcasts below
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
        """Return the module's full state dict on rank 0, and only the local part on the other ranks. Collective.

        Args:
            sends: True on the ranks of the replica whose values are taken.
            gather: gathers objects on rank 0.
        """
        own = self.module.state_dict()
        mine = {name: _to_cpu(value) for name, value in own.items() if sends and self._owner(name) == self.owned.place}
        found: dict[str, Any] = {}
        for part in gather(mine) or [mine]:
            found.update(part)
        return {name: found[name] for name in own if name in found}

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        """Load this rank's part of a full state dict.

        Raises:
            RuntimeError: shapes differ, or ``strict`` and names are missing or unexpected.
        """
        if not self.is_freed:
            self.module.load_state_dict(state, strict=strict)
            return
        freed = {id(parameter) for parameter in self.owned.remote}
        remote = {name for name, parameter in self._parameters.items() if id(parameter) in freed}
        # not strict: the freed parameters are left out, so torch would report them as missing
        found = self.module.load_state_dict({n: value for n, value in state.items() if n not in remote}, strict=False)
        missing = [name for name in found.missing_keys if name not in remote or name not in state]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(
                f"The checkpoint does not fit: missing keys {missing}, unexpected keys {found.unexpected_keys}. "
                "Set strict_loading = False on the module to ignore them."
            )

    def optimizer_state(self, optimizer: Optimizer, sends: bool, gather: Gather) -> dict[str, Any]:
        """Return the full state of an optimizer on rank 0, and only the local part on the other ranks. Collective."""
        own = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {
            key: _to_cpu(value)
            for key, value in own["state"].items()
            if sends and (not isinstance(key, int) or self.owned.owner(parameters[key]) == self.owned.place)
        }
        found: dict[Any, Any] = {}
        for part in gather(mine) or [mine]:
            found.update(part)
        # in the order of one process: keys are the numbers of parameters
        return {**own, "state": dict(sorted(found.items(), key=lambda item: str(item[0]).zfill(12)))}

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the part of an optimizer's full state that belongs to this rank's parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        local = {id(parameter) for parameter in self.owned.local}
        own = {
            key: value
            for key, value in state["state"].items()
            if not isinstance(key, int) or key >= len(parameters) or id(parameters[key]) in local
        }
        optimizer.load_state_dict({**state, "state": own})


def _bring(parameter: Parameter, device: torch.device, optimizers: list[Optimizer]) -> None:
    """Move a parameter to a device, with its gradient and the optimizer states that are on the parameter's device."""
    before = parameter.device
    if before == device:
        return
    # torch refuses new data on another device than the gradient's
    gradient, parameter.grad = parameter.grad, None
    parameter.data = parameter.data.to(device)
    parameter.grad = None if gradient is None else gradient.to(device)
    for optimizer in optimizers:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device == before:  # Adam's count of steps stays on the CPU
                state[key] = value.to(device)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(each) for key, each in value.items()}
    return value
