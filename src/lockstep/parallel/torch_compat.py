"""What torch's libraries expect of a container besides its public methods: private names, logging data."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel, _BufferCommHook, _BufferCommHookLocation
from torch.nn.parameter import Parameter

from lockstep.ground import comm
from lockstep.parallel.bucket import Plan
from lockstep.parallel.consistency import broadcast_buffers, sparse_names
from lockstep.parallel.late_parameters import LateParameters
from lockstep.parallel.shared_memory import SharedReduction

# -- optimizers that step in the backward --------------------------------------------------------------------


APPLY = "torch.distributed.optim.apply_optimizer_in_backward"
"""Torch's file; where nobody has imported it, no parameter has such an optimizer."""


def take_over(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Those of ``parameters`` that have such optimizers, which no longer step on this rank's own gradient.

    `step_all` steps them when the gradients are averaged.
    """
    apply = sys.modules.get(APPLY)
    if apply is None:
        return []
    found = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    for parameter in found:
        for handle in apply.param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()
    return found


def step_all(parameters: Iterable[Parameter]) -> None:
    """Step the optimizers of ``parameters`` and drop their gradients, as at the end of torch's backward."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None


# -- logging data --------------------------------------------------------------------------------------------


def facts(container: Any, parameters: list[Parameter], names: dict[int, str]) -> dict[str, Any]:
    """Settings and counts of a `lockstep.parallel.ddp.DistributedDataParallel`.

    Sizes are bytes, lists are text, flags are 0 or 1, as with torch's. What says how gradients travel is there once
    the first backwards have shown it; errors are those that the container raised itself.

    Args:
        container: whose they are.
        parameters: those that it averages.
        names: of them, by their place among the parameters.
    """
    group, reducer = container.process_group, container.reducer
    transport = getattr(reducer, "_transport", None)
    ids, out = container.device_ids, container.output_device
    found = {
        "world_size": comm.world_size(group),
        "rank": comm.rank(group),
        "module_name": type(container.module).__name__,
        "device_ids": " ".join(map(str, ids or ())),
        "output_device": -1 if out is None else out,
        "backend_name": dist.get_backend(group),
        "is_multi_device_module": int(container.is_multi_device_module),
        "broadcast_buffers": int(container.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in container.module.modules())),
        "bucket_cap_bytes": container.bucket_bytes_cap,
        "find_unused_parameters": int(container.find_unused_parameters),
        "gradient_as_bucket_view": int(container.gradient_as_bucket_view),
        "static_graph": int(container.static_graph),
        "join_uneven_inputs": container._has_joined,
        "comm_hook": _name_of(container._comm_hook),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "iteration": reducer.rounds,
        "collectives": reducer.collectives - getattr(transport, "spared_collectives", 0),
        "bytes_reduced": reducer.bytes - getattr(transport, "spared_bytes", 0),
        "shared_memory": int(isinstance(getattr(transport, "inner", transport), SharedReduction)),
    }
    sizes = {name: parameters[index].nbytes for index, name in names.items()}
    first, now = container._first_plan, reducer.plan()
    found["bucket_sizes"] = _sizes(first, sizes)
    found["num_buckets_reduced"] = len(now) - len(getattr(transport, "asleep", ()))
    found["has_rebuilt_buckets"] = int(now != first or getattr(reducer, "_record", None) is not None)
    if found["has_rebuilt_buckets"]:
        places = {name: str(index) for index, name in names.items()}
        found["rebuilt_bucket_sizes"] = _sizes(now, sizes)
        found["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(places[name] for name in bucket if name in places) for bucket in now
        )
    if reducer.rounds:
        found["unused_parameter_size"] = _unused(reducer)
    if container._error is not None:
        found.update(has_error=1, error=container._error)
    return found


def _name_of(hook: tuple[Any, ...] | None) -> str | None:
    return None if hook is None else getattr(hook[1], "__qualname__", type(hook[1]).__name__)


def _sizes(plan: Plan, sizes: dict[str, int]) -> str:
    """Of each bucket; a parameter that has been frozen since counts nothing."""
    return ", ".join(str(sum(sizes.get(name, 0) for name in bucket)) for bucket in plan)


def _unused(reducer: Any) -> int:
    """Bytes of the parameters that no rank used in the last round."""
    pairs = [pair for bucket in reducer._buckets for pair in zip(bucket.parameters, bucket.used, strict=True)]
    return sum(parameter.nbytes for parameter, used in pairs if not used)


# -- private names -------------------------------------------------------------------------------------------


IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module: names of parameters and buffers that its container leaves alone."""


def buffers_in_forwards(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool:
    """What a container's two arguments say about its buffers; the older one is deprecated, as in torch."""
    if broadcast_buffers is not None:
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is deprecated: say forward_sync_buffers={broadcast_buffers} (with "
            "it, buffers are rank 0's at the start in any case), which counts where both are given",
            FutureWarning,
            stacklevel=3,
        )
    return next(value for value in (forward_sync_buffers, broadcast_buffers, True) if value is not None)


class TorchNames(nn.Module):
    """What `lockstep.parallel.ddp.DistributedDataParallel` has beside its face."""

    module: nn.Module
    process_group: Any
    reducer: Any
    device: torch.device
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    bucket_bytes_cap: int
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    register_comm_hook: Callable[..., None]
    _detach: Callable[[], None]
    _buffer_futures: list[Any]
    _late: LateParameters | None
    _holders: list[dict[str, Tensor | None]] | None = None
    _error: str | None = None
    broadcast_bucket_size = 250 * 2**20

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Have the container of ``module``, which is made later, leave some parameters and buffers alone.

        They are neither compared nor broadcast, and their gradients stay on their rank.

        Args:
            module: not wrapped yet.
            params_and_buffers_to_ignore: names, as ``module.named_parameters()`` has them.
        """
        names = list(params_and_buffers_to_ignore)
        setattr(module, IGNORED, names)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Parameters that a container averages, with their names if ``named_params``."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    # -- buffers

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are taken from rank 0 before a forward: the older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are kept alike, by name."""
        return {name: b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are kept alike."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward takes buffers first."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, named_buffers)`` bring the buffers in line, in place of rank 0's broadcast.

        Args:
            state: its first argument.
            hook: may return futures, which are waited for when the backward ends.
            comm_hook_location: before the forward or after it.
        """
        if not callable(hook):
            raise TypeError(f"_register_buffer_comm_hook(hook={hook!r}): give something that can be called")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        else:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
            self._buffer_futures += futures or []

    def _has_buffers(self) -> bool:
        """Whether any module has a buffer, without walking through the modules each time."""
        late = self._late
        if self._holders is None or late is None or late.changed:
            self._holders = [part._buffers for part in self.module.modules()]
            if late is not None:
                late.changed = False
        return any(self._holders)

    def _await_buffers(self) -> None:
        while self._buffer_futures:
            self._buffer_futures.pop().wait()

    def _default_broadcast_coalesced(
        self, bufs: Iterable[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Overwrite ``bufs`` (all buffers) with those of a rank."""
        broadcast_buffers(self.modules_buffers if bufs is None else bufs, authoritative_rank, self.process_group)

    # -- hooks and optimizers

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """As `register_comm_hook`, with one of torch's by its number."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Let an optimizer of class ``optim`` update each bucket's parameters as soon as it is reduced.

        Args:
            optim: one that has a functional form in torch (SGD, Adam, AdamW).
            *args, **kwargs: of it.
            optim_params: those that it updates; all if None.
        """
        from torch.distributed.algorithms._optimizer_overlap import _as_overlapped_optim

        try:
            _as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"_register_fused_optim({optim.__name__}): torch has no form of it that steps bucket by bucket"
            ) from error

    # -- the reducer

    def _build_params_for_reducer(self) -> tuple[list[Parameter], list[bool]]:
        """The parameters that are averaged, in order, and whether each one's gradients are sparse."""
        sparse = sparse_names(self.module)
        named = [(name, p) for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]
        named = [(name, p) for name, p in named if p.requires_grad]
        return [p for _, p in named], [name in sparse for name, _ in named]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Parameter]) -> dict[int, str]:
        """The names of ``parameters``, by their places.

        Raises:
            ValueError: they are not those that are averaged.
        """
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in self.parameters_to_ignore:
                if id(parameter) not in places:
                    raise ValueError(f"Param with name {name} of the module is not among the given parameters")
                names[places[id(parameter)]] = name
        if len(names) != len(places):
            raise ValueError(
                f"Expected param to name mapping of {len(names)} parameters that are averaged, and not of {len(places)}"
            )
        return names

    def _set_static_graph(self) -> None:
        """Promise that every backward is like the first, before the first backward."""
        if self.static_graph:
            warnings.warn("static_graph is True already; it need not be set again.", stacklevel=2)
            return
        if self.reducer.rounds:
            raise self._noted(
                RuntimeError(
                    "_set_static_graph() should be called before training loop starts, and a backward has been: give "
                    "static_graph=True to the container"
                )
            )
        self.static_graph = True
        self._detach()

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward did not reduce everything."""
        names = self.reducer.missing()
        if names:
            error = f"the last backward ended before the gradient of parameter {names[0]!r} was reduced"
            raise self._noted(RuntimeError(error))

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over other ranks from now on."""
        if dist.get_rank(new_process_group) >= 0:
            self._detach()
            self.process_group = new_process_group

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned here, so there is nothing to set."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing is sampled here; the value is checked."""
        if sample_rate < 1:
            raise ValueError(f"_set_ddp_runtime_logging_sample_rate({sample_rate}): equal or greater than 1")

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are laid out for good; torch's hooks that step a ZeroRedundancyOptimizer wait for it."""
        return bool(self.reducer._remade)

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Settings and counts, by the names of torch's container: see `lockstep.parallel.torch_compat.facts`."""
        parameters, _ = self._build_params_for_reducer()
        return facts(self, parameters, self._build_debug_param_to_name_mapping(parameters))

    def _noted(self, error: Exception) -> Exception:
        """``error``, after it has been noted for `_get_ddp_logging_data`."""
        self._error = f"{type(error).__name__}: {error}"
        return error


# isinstance(container, torch's class) holds: by it torch.distributed.checkpoint takes "module." off names, its
# PipelineStage reduces once a step, and others find the module inside.
DistributedDataParallel.register(TorchNames)
