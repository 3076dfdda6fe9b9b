"""What torch's ``_get_ddp_logging_data`` tells of a container: settings, layout and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import Parameter

from lockstep.engines.ddp.bucket import Plan
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.shared_memory import SharedReduction
from lockstep.ground import comm


def logging_data(container: Any, parameters: list[Parameter], names: dict[int, str]) -> dict[str, Any]:
    """Settings and counts of a `lockstep.engines.ddp.container.DistributedDataParallel`.

    Sizes are bytes, lists are text, flags are 0 or 1, as with torch's. What says how gradients travel is there once
    the first backwards have shown it; errors are those that the container raised itself.
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
        "join_uneven_inputs": container.joining.has_joined,
        "comm_hook": _name_of(container._comm_hook),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "iteration": reducer.rounds,
        "collectives": reducer.collectives - getattr(transport, "skipped_collectives", 0),
        "bytes_reduced": reducer.bytes - getattr(transport, "skipped_bytes", 0),
        "shared_memory": int(isinstance(getattr(transport, "inner", transport), SharedReduction)),
    }
    found.update(_layouts(container, parameters, names))
    if reducer.rounds:
        found["unused_parameter_size"] = _unused(reducer)
    if container._error is not None:
        found.update(has_error=1, error=container._error)
    return found


def _name_of(hook: tuple[Any, ...] | None) -> str | None:
    return None if hook is None else getattr(hook[1], "__qualname__", type(hook[1]).__name__)


def _layouts(container: Any, parameters: list[Parameter], names: dict[int, str]) -> dict[str, Any]:
    """The first layout of the buckets and, where they have been laid out anew, the present one."""
    reducer = container.reducer
    sizes = {name: parameters[index].nbytes for index, name in names.items()}
    first, now = container._first_plan, reducer.plan()
    skipped = getattr(getattr(reducer, "_transport", None), "skipped", ())
    rebuilt = now != first or getattr(reducer, "_recorded", None) is not None
    found: dict[str, Any] = {
        "bucket_sizes": _sizes(first, sizes),
        "num_buckets_reduced": len(now) - len(skipped),
        "has_rebuilt_buckets": int(rebuilt),
    }
    if rebuilt:
        places = {name: str(index) for index, name in names.items()}
        found["rebuilt_bucket_sizes"] = _sizes(now, sizes)
        found["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(places[name] for name in bucket if name in places) for bucket in now
        )
    return found


def _sizes(plan: Plan, sizes: dict[str, int]) -> str:
    """Of each bucket; a parameter that has been frozen since counts nothing."""
    return ", ".join(str(sum(sizes.get(name, 0) for name in bucket)) for bucket in plan)


def _unused(reducer: Reducer) -> int:
    """Bytes of the parameters that no rank used in the last round."""
    pairs = [pair for bucket in reducer._buckets for pair in zip(bucket.parameters, bucket.used, strict=True)]
    return sum(parameter.nbytes for parameter, used in pairs if not used)


def names_by_place(named: Iterable[tuple[str, Parameter]], parameters: Sequence[Parameter]) -> dict[int, str]:
    """The names of ``parameters``, by their places.

    Raises:
        ValueError: they are not those that are averaged, which ``named`` holds.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    names: dict[int, str] = {}
    for name, parameter in named:
        if id(parameter) not in places:
            raise ValueError(f"Param with name {name} of the module is not among the given parameters")
        names[places[id(parameter)]] = name
    if len(names) != len(places):
        raise ValueError(
            f"Expected param to name mapping of {len(names)} parameters that are averaged, and not of {len(places)}"
        )
    return names
