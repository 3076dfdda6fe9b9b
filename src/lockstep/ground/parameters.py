"""Functions for parameters: gradient norms, clipping by value, names, and shards.

A shard is the part of a tensor that this rank stores. It is empty for weights that only another rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement, Shard


def grad_norm(
    module: torch.nn.Module, norm_type: float | int | str, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """Return the p-norm of each parameter's gradient, and of all gradients as one vector.

    Args:
        module: the module; parameters without a gradient are skipped.
        norm_type: p > 0, or ``"inf"`` for the largest absolute value.
        group_separator: separates the norm's name from the parameter's, as the logger groups names.

    Returns:
        Scalars ``grad_2.0_norm/<parameter>``, and ``grad_2.0_norm_total``; empty if there is no gradient.

    Raises:
        ValueError: p is not positive.

    Example::

        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self, norm_type=2))
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r} is not valid: pass a positive number or 'inf'")
    norms = {
        f"grad_{p}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad.detach(), p)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        values = list(norms.values())
        # parameters may be on several devices
        together = torch.stack([value.to(values[0].device) for value in values])
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(together, p)
    return norms


LAZY = (
    "{who}: parameter {name!r} belongs to a lazy layer, which has no shape before its first forward. Pass sizes to the "
    "layer (nn.Linear(in_features, ...)), or run one batch through the module in its `configure_model`: "
    "`self(torch.zeros(2, in_features))`."
)


def refuse_lazy(module: nn.Module, who: str) -> None:
    """Raise an error if a module has a lazy parameter, which has no shape yet.

    Args:
        module: the module to check.
        who: name of the feature that does not support it.

    Raises:
        MisconfigurationException: a parameter is lazy.
    """
    name = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if name is not None:
        raise MisconfigurationException(LAZY.format(who=who, name=name))


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clip gradients to [-value, value] in place. For complex gradients, clip real and imaginary parts separately."""
    real: list[Tensor] = []
    for parameter in parameters:
        # torch has no clamp for complex numbers.
        if parameter.grad is not None and parameter.grad.is_complex():
            torch.view_as_real(parameter.grad).clamp_(-value, value)
        else:
            real.append(parameter)
    if real:  # torch refuses an empty list, and a window may have no loss
        torch.nn.utils.clip_grad_value_(real, value)


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter with several names, such as an embedding tied to the output layer.

    Args:
        module: module to search, with its submodules.

    Returns:
        a list of names for each such parameter, in the order of ``named_modules``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> find_shared_parameters(model)
        [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return [found for found in names.values() if len(found) > 1]


def set_shared_parameters(module: nn.Module, shared_params: Sequence[Sequence[str]]) -> nn.Module:
    """Tie the parameters of each list of names to the parameter with the first name. Return the module.

    Args:
        module: changed in place.
        shared_params: names as :func:`find_shared_parameters` returns them.

    Example::

        shared = find_shared_parameters(model)
        model = convert(model)  # your function that creates new parameters, one for each name
        set_shared_parameters(model, shared)
    """
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)
    return module


def plain_name(name: str) -> str:
    """Convert a name from ``named_parameters`` to the key that the parameter has in a state dict.

    torch's ``CheckpointWrapper`` adds to the names of ``named_parameters``, but not to the keys of state dicts.

    Example:
        >>> plain_name("layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return name.replace("_checkpoint_wrapped_module.", "")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter, also if DeepSpeed's stage 3 has emptied it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Expand parameters that DeepSpeed has emptied to their full shape inside the block, without using memory."""
    shown: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in module.parameters():
        if not is_lazy(parameter) and parameter.shape != whole_shape(parameter) and not parameter.numel():
            shown.append((parameter, parameter.data))
            # An expanded scalar takes no memory, whatever its shape.
            one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            parameter.data = one.expand(whole_shape(parameter))
    try:
        yield
    finally:
        for parameter, empty in shown:
            parameter.data = empty


def parameters_outside(module: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """Return the parameters in ``optimizers`` that ``module.parameters()`` lacks, keyed by their optimizer and index.

    A module that stores parameters in a plain list, for example, does not list them.
    """
    seen = {id(parameter) for parameter in module.parameters()}
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(listed(group["params"])):
                trained = isinstance(parameter, Parameter) or parameter.requires_grad
                if trained and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"optimizers[{number}].param_groups[{place}]['params'][{index}]"] = parameter
    return found


def listed(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Iterate over an optimizer group's parameters. Bypass an ``__iter__`` that a subclass of list may define."""
    return list.__iter__(parameters) if isinstance(parameters, list) else iter(parameters)


@contextmanager
def state_dicts_without(module: nn.Module, is_left_out: Callable[[str], bool]) -> Iterator[None]:
    """Omit the names for which ``is_left_out`` is True from a module's state dicts inside the block.

    Their values are not gathered then.
    """

    def drop(module: nn.Module, state: dict[str, Any], *_: object) -> None:
        for name in [name for name in state if is_left_out(name)]:
            del state[name]

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()


KEPT = "_lockstep_keeps_dtype"
"""Attribute of a layer with the names of its parameters and buffers that keep their dtype."""


def keep_dtype(layer: nn.Module, names: Iterable[str]) -> None:
    """Mark parameters and buffers of a layer, so that a conversion of the model does not change their dtype."""
    vars(layer)[KEPT] = frozenset(names)


@contextmanager
def keeping_dtypes(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers marked by `keep_dtype` after the block, which may convert the module's dtype."""
    named = [(layer, name) for layer in module.modules() for name in vars(layer).get(KEPT, ())]
    buffers = [(layer, name, layer._buffers[name]) for layer, name in named if name in layer._buffers]
    parameters = [layer._parameters.get(name) for layer, name in named if name in layer._parameters]
    values = [(parameter, parameter.data) for parameter in parameters if parameter is not None]
    yield
    for layer, name, buffer in buffers:
        layer._buffers[name] = buffer
    for parameter, value in values:
        parameter.data = value


def loads_by_name(module: nn.Module) -> bool:
    """Return True if a module loads each tensor of a state dict into the parameter or buffer of the same name.

    A mismatch of names or shapes can then be detected before any value changes.
    """
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return False
    for layer in module.modules():
        # Normalization layers override it only to add a counter that old state dicts lack.
        by_torch = type(layer)._load_from_state_dict is nn.Module._load_from_state_dict
        if not by_torch and not isinstance(layer, nn.modules.batchnorm._NormBase):
            return False
        # FSDP's hooks leave names and values as they are.
        hooks = [getattr(hook, "hook", hook) for hook in layer._load_state_dict_pre_hooks.values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp") for hook in hooks):
            return False
        tensors = (*layer._parameters.values(), *layer._buffers.values())
        if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
            return False
    return True


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor without copying it; return other tensors unchanged."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def box_of(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slice that this rank's shard of a DTensor covers in each dimension; full slices for other tensors."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return tuple(slice(0, size) for size in tensor.shape)
    return box_in(tensor.shape, mesh, placements)


def box_in(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """Return the slice that this rank's shard of a DTensor with the given layout covers in each dimension.

    torch's ``compute_local_shape_and_global_offset`` does this too, but is wrong for sizes that tensor parallelism and
    then ``fully_shard`` divide unevenly: with 50,257 rows on a mesh of 4 x 2 two ranks would get the same row.

    Args:
        shape: shape of the full tensor.
        mesh: the mesh; a rank outside of the mesh gets empty slices.
        placements: one for each dimension of the mesh.
    """
    place = mesh.get_coordinate()
    if place is None:
        return tuple(slice(0, 0) for _ in shape)
    # Mesh dimensions shard a tensor from left to right, except for those that sharded again what dimensions on their
    # right had sharded: these come last, from right to left.
    cut = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    again = [axis for axis in cut if hasattr(placements[axis], "split_factor")]
    box = [slice(0, size) for size in shape]
    for axis in [*(axis for axis in cut if axis not in again), *reversed(again)]:
        dim = cast("Shard", placements[axis]).dim
        whole = box[dim]
        # as `torch.chunk` divides: the last chunks are smaller or empty
        step = -(-(whole.stop - whole.start) // mesh.size(axis))
        start = min(whole.start + place[axis] * step, whole.stop)
        box[dim] = slice(start, min(start + step, whole.stop))
    return tuple(box)


def starts_of(tensor: Tensor) -> list[int]:
    """Return the start index of this rank's shard of a DTensor in each dimension; zeros for other tensors."""
    return [each.start for each in box_of(tensor)]


def is_sharded_twice(tensor: Tensor) -> bool:
    """Return True if tensor parallelism and then ``fully_shard`` have sharded the same dimension of a DTensor."""
    return any(hasattr(placement, "split_factor") for placement in getattr(tensor, "placements", ()))


FSDP, DEEPSPEED, PIPELINE = "fsdp", "deepspeed", "balanced"
"""Engines that split modules, by their strategies' names."""


def is_split(module: nn.Module) -> bool:
    """Return True if torch's ``fully_shard`` or tensor parallelism has sharded the module."""
    by_torch = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return by_torch or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def is_partitioned(parameter: Tensor) -> bool:
    """Return True if DeepSpeed has partitioned a parameter over the ranks."""
    return hasattr(parameter, "ds_id")


def partition_values(parameter: Any, rank: int) -> Tensor:
    """Return the elements of a parameter that DeepSpeed has assigned to a rank, without padding.

    The padding is uninitialized memory.
    """
    part: Tensor = parameter.ds_tensor.detach().flatten()
    return part[: max(0, parameter.ds_shape.numel() - rank * part.numel())]


def is_freed(module: nn.Module) -> bool:
    """Return True if a pipeline has freed any parameter of this module on this rank, since other ranks store it."""
    return any(is_placeholder(parameter) for parameter in module.parameters())


def engine_that_split(module: nn.Module) -> str:
    """Return the name of the engine that has split a module among the ranks; "" if no engine has."""
    if is_freed(module):
        return PIPELINE
    if is_split(module):
        return FSDP
    return DEEPSPEED if any(is_partitioned(parameter) for parameter in module.parameters()) else ""


def is_placeholder(parameter: Tensor) -> bool:
    """Return True if a parameter is a placeholder whose values are on another rank of the pipeline."""
    if is_lazy(parameter):
        return False
    strided = parameter.layout is torch.strided and not parameter.is_meta
    return strided and parameter.numel() > 1 and not any(parameter.stride())
