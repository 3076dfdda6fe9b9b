"""Support for calling a sharded module's layers in hooks, or after a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.engines.sharded.fsdp_groups import groups_of_state

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class GatheredCalls:
    """Hooks that gather the root module's FSDP parameter group for layer calls outside of a step, then free it.

    Within a step the module's entry method has gathered the parameters, and the end of a step or an evaluation frees
    them. Without this class, later code would read and write parameters that a call has left gathered, not the shards.

    Args:
        module: a module with ``fully_shard`` called on it or on some of its layers.
        is_busy: returns True while a step or a backward runs.
        free: frees gathered parameters.
        within: also support calls after a backward within a step, as in manual optimization.
    """

    def __init__(self, module: nn.Module, is_busy: Callable[[], bool], free: Callable[[], None], within: bool) -> None:
        self._module, self._is_busy, self._free = module, is_busy, free
        self._state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        self._gathered_for: nn.Module | None = None
        self._handles = [part.register_forward_hook(self._end_of_part) for part in _outermost_parts(module)]
        if self._state is None:  # each part gathers its own parameters
            return
        own = set(self._owners())
        # only the outermost layers: a call of one runs the inner ones, whose parameters must stay gathered
        for layer in _outermost(module, own):
            self._handles.append(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._end, always_call=True))
        if within:
            layers = [layer for layer in module.modules() if layer in own and layer is not module]
            self._handles += [layer.register_forward_pre_hook(self._gather_within) for layer in layers]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _owners(self) -> Iterator[nn.Module]:
        for group in groups_of_state(self._state):
            for param in group.fsdp_params:
                yield param._module_info.module
                yield from param._module_info.shared_modules

    def _is_whole(self) -> bool:
        return all(group.is_unsharded for group in groups_of_state(self._state))

    def _begin(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_busy() or self._is_whole():
            return None
        self._gathered_for = layer
        # torch's own hook before the module's forward, which may cast the inputs too
        return self._state._pre_forward(self._module, args, kwargs)

    def _end(self, layer: nn.Module, args: object, output: Any) -> Any:
        if self._gathered_for is not layer:
            return None
        self._gathered_for = None
        output = self._state._post_forward(self._module, args, output)
        self._free()
        return output

    def _end_of_part(self, part: nn.Module, args: object, output: object) -> None:
        if not self._is_busy():
            self._free()

    def _gather_within(self, layer: nn.Module, args: object) -> None:
        if self._is_busy() and not self._is_whole():
            root: Any = self._module
            root.unshard()


def _outermost_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules on which ``fully_shard`` was called."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost_parts(child)


def _outermost(module: nn.Module, own: set[nn.Module]) -> Iterable[nn.Module]:
    """Yield the outermost callable layers with parameters in the FSDP parameter group of the root module."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _outermost(child, own)
        elif any(layer in own for layer in child.modules()):
            yield child
