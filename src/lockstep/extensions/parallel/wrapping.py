"""Checks of a container's module and process group, when the module is wrapped and later."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter, UninitializedParameter

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.late_parameters import LateParameters
from lockstep.extensions.parallel.torch_parts import PARTS
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.torch_support import DDP, refuse_without

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- the start -----------------------------------------------------------------------------------------------


def find_group(group: comm.Group, mesh: DeviceMesh | None, module: nn.Module) -> Any:
    """Return the process group of a container, from the given group, the mesh, or the default group.

    Args:
        group: a process group; None is the default one.
        mesh: a 1-D device mesh, or None. If it is part of a larger mesh, ``module`` is transformed as torch does it.
        module: the module to be wrapped.

    Raises:
        MisconfigurationException: there is no process group, this rank is not in it, or this version of torch lacks
            parts that a container needs.
    """
    refuse_without(DDP, DDP, "train on one device", PARTS)
    if not comm.is_distributed():
        raise MisconfigurationException(
            "DistributedDataParallel: Default process group has not been initialized; call "
            "torch.distributed.init_process_group(...) first, on every rank"
        )
    if group is not None and mesh is not None:
        raise MisconfigurationException("Cannot specify both process_group and device_mesh arguments. Pass only one")
    if mesh is not None:
        if mesh.ndim != 1:
            raise MisconfigurationException(
                f"Only 1D device mesh is supported, but device_mesh={mesh!r} has {mesh.ndim} dimensions. Pass one of "
                "them, as in mesh['replicate']"
            )
        if mesh._get_root_mesh() != mesh:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        group = mesh.get_group(mesh_dim=0)
    found = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise MisconfigurationException(
            f"process_group: rank {dist.get_rank()} (of {dist.get_world_size()}) is not a member of the group. Wrap "
            "the model only on the ranks of the group"
        )
    # the first parameter is enough: all are on devices of one type
    for parameter in module.parameters() if isinstance(module, nn.Module) else ():
        comm.travel_by(parameter.device, found)
        break
    return found


def _find_problem(parameter: Tensor) -> str | None:
    """Return the reason why a parameter's gradient cannot be averaged, with a remedy; None if it can."""
    if isinstance(parameter, UninitializedParameter):
        return "belongs to a lazy module and has no shape yet. Run one batch through the model before you wrap it"
    if parameter.is_meta:
        return (
            "is on the meta device and has no values. Initialize it before you wrap the model "
            "(module.to_empty(device=...), then load a state dict or reset its parameters)"
        )
    if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return (
            "is expanded: several of its elements share memory, so an optimizer cannot update them. "
            "Make a copy (tensor.expand(...).clone())"
        )
    return None


def find_unusable(module: nn.Module, ignored: Collection[str] = (), group: comm.Group = None) -> str | None:
    """Return the reason why gradients of ``module`` cannot be averaged, with a remedy; None if they can.

    A container of lockstep may be wrapped again as a whole over the same ``group``; then the outer one averages.
    """
    if not isinstance(module, nn.Module):
        return f"module={module!r}: pass a torch.nn.Module"
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    kind = type(module).__name__
    for name, parameter in named:
        problem = _find_problem(parameter)
        if problem is not None:
            return f"parameter {name!r} of {kind} {problem}"
    trained = {id(parameter) for _, parameter in named if parameter.requires_grad}
    for inner, part in module.named_modules():
        own = (id(parameter) for parameter in part.parameters())
        # by this attribute, which torch's container has as well
        averages = hasattr(part, "require_backward_grad_sync") and not trained.isdisjoint(own)
        if averages and not (part is module and _can_be_wrapped(part, group)):
            where = f"part {inner!r} of {kind}" if inner else "the module"
            return (
                f"{where} is a DistributedDataParallel already, and two cannot average the same gradients. Wrap the "
                "model once, as a whole"
            )
    types = sorted({parameter.device.type for _, parameter in named})
    if len(types) > 1:
        return f"{kind} has parameters on {' and '.join(types)}. Move the module to devices of one type"
    if not any(parameter.requires_grad for _, parameter in named):
        return f"{kind}: no parameter requires a gradient, so there is nothing to average. Use the bare module"
    return None


def _can_be_wrapped(container: nn.Module, group: comm.Group) -> bool:
    """Return True if an outer container over ``group`` can wrap ``container`` and average gradients in its place."""
    if not hasattr(container, "use_reducer"):
        return False
    settings = vars(container)
    ours = settings["process_group"] is group
    return ours and not (settings["parameters_to_ignore"] or (settings["device_ids"] or ())[1:])


def buffers_in_forwards(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool:
    """Return True if forwards synchronize buffers, according to a container's two arguments.

    ``broadcast_buffers`` is deprecated, as in torch. Default: True.
    """
    if broadcast_buffers is not None:
        constructor = "" if broadcast_buffers else " The constructor then broadcasts rank 0's buffers (init_sync)."
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is deprecated: use forward_sync_buffers={broadcast_buffers}, which "
            f"has priority if both are given.{constructor}",
            FutureWarning,
            stacklevel=3,
        )
    return next(value for value in (forward_sync_buffers, broadcast_buffers, True) if value is not None)


# -- later ---------------------------------------------------------------------------------------------------


def find_changed(frozen: Mapping[str, Parameter], late: LateParameters | None) -> str | None:
    """Return a sentence about a parameter whose gradient would not be averaged. Return None if there is none.

    The caller puts the rank in front of the sentence.

    Args:
        frozen: parameters that were frozen when the model was wrapped, by name.
        late: parameters added since then; None if they are not checked.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            return (
                f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now. Wrap the model "
                "with the parameter unfrozen (requires_grad may change afterwards), or wrap it again now"
            )
    if late is not None and late.found is not None:
        return (
            f"parameter {late.found!r} was added to the model after it was wrapped, so its gradient would not be "
            "averaged. Add it before, or wrap model.module again"
        )
    return None


def find_cast(buckets: Iterable[Bucket]) -> str | None:
    """Return a sentence about a parameter that no longer has the dtype, shape and device of its bucket; None if all do.

    The caller puts the rank in front of the sentence.
    """
    for bucket in buckets:
        for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=False):
            before, now = [(t.dtype, tuple(t.shape), t.device) for t in (view, parameter)]
            if now != before:
                return (
                    f"parameter {name!r} is {now[0]} of shape {now[1]} on {now[2]}, but was {before[0]} of shape "
                    f"{before[1]} on {before[2]} when the model was wrapped. Cast or move the container, not the "
                    "module in it"
                )
    return None
