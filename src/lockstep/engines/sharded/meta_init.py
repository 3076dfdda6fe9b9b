"""First values for layers that were made on the meta device, where parameters have a shape and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.engines.sharded.fully_shard import cut_like, local_part
from lockstep.ground.errors import MisconfigurationException

NO_RESET = (
    "{layer} has {name!r} on the meta device, and no `reset_parameters` that gives it values: add that method to "
    "{kind}, or make the layer without torch.device('meta')."
)
UNSET = "{layer}: `reset_parameters` of {kind} leaves {name!r} without values, and it was made on the meta device."


@torch.no_grad()
def leave_meta(module: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory, and the values of each layer's ``reset_parameters``.

    Layers are asked in the order in which they are registered, one by one, so that no more than one is whole at a
    time. A layer that is cut already (its parameters are DTensors) draws for the whole, and keeps its part: on a CPU
    torch would give the same random numbers to each part.

    Args:
        module: changed in place; what is not on the meta device stays as it is.
        device: of what gets memory.

    Raises:
        MisconfigurationException: a layer has no ``reset_parameters``, or one that leaves a parameter as it was.
    """
    waiting = [(name, layer) for name, layer in module.named_modules() if any(True for _ in _on_meta(layer))]
    if not waiting:
        return
    for prefix, layer in waiting:
        if not callable(getattr(layer, "reset_parameters", None)):
            name = next(iter(_on_meta(layer)))
            raise MisconfigurationException(
                NO_RESET.format(layer=prefix or "The module", name=name, kind=type(layer).__name__)
            )
    ties = _Ties(module)
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    ties.restore()
    for prefix, layer in waiting:
        _reset(layer, ties.names[id(layer)], prefix or "The module")


def _on_meta(layer: nn.Module) -> Iterator[str]:
    own = {**layer._parameters, **layer._buffers}
    return (name for name, tensor in own.items() if tensor is not None and tensor.is_meta)


class _Ties:
    """The places that share a tensor, which ``Module._apply`` would part.

    Attributes:
        names: of what a layer is to give values to, by its id.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self.names: dict[int, list[str]] = {}
        for layer in module.modules():
            self.names[id(layer)] = []
            for name in _on_meta(layer):
                tensor = _found(layer, name)
                if id(tensor) not in self._places:  # a layer that shares it leaves it as the first one made it
                    self.names[id(layer)].append(name)
                self._places.setdefault(id(tensor), []).append((layer, name))

    def restore(self) -> None:
        """Let them share one again."""
        for (first, name), *others in self._places.values():
            for layer, other in others:
                _put(layer, other, _found(first, name))


def _reset(layer: nn.Module, names: list[str], shown: str) -> None:
    """Values for what has none yet; what the layer had already keeps its own."""
    with _whole(layer, names):
        layer.reset_parameters()  # type: ignore[operator]  # looked for before
        for name in names:
            tensor = _found(layer, name)
            if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
                raise MisconfigurationException(UNSET.format(layer=shown, kind=type(layer).__name__, name=name))


@contextmanager
def _whole(layer: nn.Module, names: list[str]) -> Iterator[None]:
    """Inside, what is named is whole and NaN, and everything else of the layer a copy; afterwards it keeps its part."""
    own = {**layer._parameters, **layer._buffers}
    for name, tensor in own.items():
        if tensor is None:
            continue
        if name in names:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local_part(tensor).device)
            if tensor.is_floating_point():
                whole.fill_(torch.nan)
        else:
            whole = tensor.detach().clone()
        _put(layer, name, Parameter(whole, tensor.requires_grad) if name in layer._parameters else whole)
    try:
        yield
    finally:
        for name, tensor in own.items():
            if tensor is not None and name in names:
                local_part(tensor).copy_(local_part(cut_like(tensor, _found(layer, name).detach())))
            _put(layer, name, tensor)


def _found(layer: nn.Module, name: str) -> Tensor:
    found = layer._parameters[name] if name in layer._parameters else layer._buffers[name]
    assert found is not None
    return found


def _put(layer: nn.Module, name: str, tensor: Tensor | None) -> None:
    if name in layer._buffers:
        layer._buffers[name] = tensor
    else:
        assert tensor is None or isinstance(tensor, Parameter)
        layer._parameters[name] = tensor
