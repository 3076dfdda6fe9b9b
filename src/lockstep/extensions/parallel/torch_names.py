"""Implementation of private names of torch's DistributedDataParallel that torch's own libraries use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation
from torch.nn.parameter import Parameter

from lockstep.engines.ddp.consistency import broadcast_buffers, sparse_names
from lockstep.engines.ddp.reducer import Reducer
from lockstep.ground.errors import MisconfigurationException

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Name of the module attribute that lists the parameters and buffers which its container ignores."""
ALWAYS = (
    "gradients are averaged when backward() returns, since each bucket is sent while the backward runs. Remove the "
    "manual finalization, and step after the backward"
)


class TorchNames:
    """Base class that gives a container those private names of torch's container that torch's libraries use."""

    module: nn.Module
    process_group: Any
    static_graph: bool
    parameters_to_ignore: set[str]
    buffer_hook: _BufferCommHook
    _buffer_futures: list[Any]

    @property
    def reducer(self) -> Reducer:
        """Reducer that averages the gradients."""
        raise NotImplementedError

    def _detach(self) -> None:
        raise NotImplementedError

    # -- parameters

    def _build_params_for_reducer(self) -> tuple[list[Parameter], list[bool]]:
        sparse, named = sparse_names(self.module), self._averaged()
        return [p for _, p in named], [name in sparse for name, _ in named]

    def _averaged(self) -> list[tuple[str, Parameter]]:
        named = self.module.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad and name not in self.parameters_to_ignore]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Parameter]) -> dict[int, str]:
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self._averaged():
            if id(parameter) not in places:
                raise ValueError(f"Param with name {name} of the module is not among the given parameters")
            names[places[id(parameter)]] = name
        if len(names) != len(places):
            raise ValueError(
                f"Expected param to name mapping of {len(names)} averaged parameters, but got {len(places)}"
            )
        return names

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("static_graph is already True; remove the second call.", stacklevel=2)
            return
        if self.reducer.rounds:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts, but a backward has run. Pass "
                "static_graph=True to the container"
            )
        self.static_graph = True
        self._detach()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        pass  # outputs are never cloned here

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """True if the buckets have their final layout. torch's hooks for ZeroRedundancyOptimizer wait for this."""
        return bool(self.reducer.is_laid_out)

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Mark parameters and buffers of ``module``, by name, so that a container created later ignores them."""
        names = list(params_and_buffers_to_ignore)
        setattr(module, IGNORED, names)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    # -- buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers that are synchronized in forwards, by name."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Buffers that are synchronized in forwards."""
        return list(self.named_module_buffers.values())

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Register ``hook(state, named_buffers)`` to synchronize buffers; the hook may return futures."""
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook(hook={hook!r}): the hook must be callable")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        # not by attribute: nn.Module raises for a missing one
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        else:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
            self._buffer_futures += futures or []

    def _default_broadcast_coalesced(
        self, bufs: Iterable[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        broadcast_buffers(self.modules_buffers if bufs is None else bufs, authoritative_rank, self.process_group)

    # -- a backward that the caller finishes: refused

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Always False, because the reduction has finished when a backward returns."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            raise MisconfigurationException(f"require_manual_backward_finalization=True: {ALWAYS}.")

    @property
    def should_finalize_after_backward(self) -> bool:
        """Always False, because the backward finishes the reduction itself."""
        return False

    def finalize_backward(self) -> None:
        """Raise an error, because the backward finishes the reduction itself.

        Raises:
            MisconfigurationException: always.
        """
        raise MisconfigurationException(f"finalize_backward(): {ALWAYS}.")
