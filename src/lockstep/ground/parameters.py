"""Parameters: gradient norms, clipping by value, names in a module, and shards.

The part of a tensor is what this rank stores: its own shard of a DTensor, and nothing of weights on another rank.
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
        module: the module; parameters without a gradient are left out.
        norm_type: p > 0; ``"inf"`` for the largest element.
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
        raise ValueError(f"norm_type={norm_type!r}: give a positive number, or 'inf'")
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
    "{who}: parameter {name!r} belongs to a lazy layer, which gets its shape only in its first forward. Give the layer "
    "its sizes (nn.Linear(in_features, ...)), or run one batch through the module in its `configure_model`: "
    "`self(torch.zeros(2, in_features))`."
)


def refuse_lazy(module: nn.Module, who: str) -> None:
    """Refuse a module with a parameter that has no shape yet.

    Args:
        module: the module to check.
        who: name of the feature that does not support it.

    Raises:
        MisconfigurationException: names the parameter and the way out.
    """
    name = next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if name is not None:
        raise MisconfigurationException(LAZY.format(who=who, name=name))


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clip the gradients of ``parameters`` in place; real and imaginary parts separately for complex ones."""
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
    """Return the names of each parameter that has several, such as an embedding tied to the output layer's weight.

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
    """Tie the parameters of each list of names to that of its first name, and return the module.

    Args:
        module: changed in place.
        shared_params: names as :func:`find_shared_parameters` returns them.
    """
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)
    return module


def plain_name(name: str) -> str:
    """Return the name of a parameter as a state dict has it.

    torch's ``CheckpointWrapper`` adds to the names of ``named_parameters``, but not to the keys of state dicts.

    Example:
        >>> plain_name("layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    return name.replace("_checkpoint_wrapped_module.", "")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter; with DeepSpeed's stage 3 the module has an empty one."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


@contextmanager
def whole_shapes(module: nn.Module) -> Iterator[None]:
    """Give empty parameters their full shape inside the block, filled with zeros that take no memory."""
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


def beside(module: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """Return the parameters in ``optimizers`` that ``module`` lacks (such as in a plain list), by their place there."""
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
    """Iterate over an optimizer's parameters without a wait: a sharded list's own iterator waits for pending work."""
    return list.__iter__(parameters) if isinstance(parameters, list) else iter(parameters)


@contextmanager
def state_dicts_without(module: nn.Module, is_left_out: Callable[[str], bool]) -> Iterator[None]:
    """Leave some names out of a module's state dicts inside the block, so that their values are not gathered."""

    def drop(module: nn.Module, state: dict[str, Any], *_: object) -> None:
        for name in [name for name in state if is_left_out(name)]:
            del state[name]

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()


KEPT = "_lockstep_keeps_dtype"
"""Attribute of a layer with the names of parameters and buffers whose dtype does not follow the model's."""


def keep_dtype(layer: nn.Module, names: Iterable[str]) -> None:
    """Keep the dtype of some parameters and buffers of a layer when the model is converted."""
    vars(layer)[KEPT] = frozenset(names)


@contextmanager
def keeping_dtypes(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers named by `keep_dtype` after a conversion of a module inside the block."""
    named = [(layer, name) for layer in module.modules() for name in vars(layer).get(KEPT, ())]
    buffers = [(layer, name, layer._buffers[name]) for layer, name in named if name in layer._buffers]
    parameters = [layer._parameters.get(name) for layer, name in named if name in layer._parameters]
    values = [(parameter, parameter.data) for parameter in parameters if parameter is not None]
    yield
    for layer, name, buffer in buffers:
        layer._buffers[name] = buffer
    for parameter, value in values:
        parameter.data = value


def takes_names_as_they_are(module: nn.Module) -> bool:
    """Return True if loading a state dict compares only names and shapes.

    Then a mismatch is known before values change, and each tensor is loaded into the parameter of its name.
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
    """Return this rank's shard of a DTensor, without a copy; another tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def box_of(tensor: Tensor) -> tuple[slice, ...]:
    """Return the range of each dimension that this rank's shard covers; the full range for other tensors."""
    placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return tuple(slice(0, size) for size in tensor.shape)
    return box_in(tensor.shape, mesh, placements)


def box_in(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """Return the range of each dimension that this rank's shard of a DTensor would cover.

    torch's ``compute_local_shape_and_global_offset`` does this too, but is wrong for sizes that tensor parallelism and
    then ``fully_shard`` divide unevenly: with 50,257 rows on a mesh of 4 x 2 two ranks would get the same row.

    Args:
        shape: shape of the whole tensor.
        mesh: the mesh; a rank outside of it gets an empty range.
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
    """Return the first index, in each dimension, of this rank's shard of a DTensor; zeros for other tensors."""
    return [each.start for each in box_of(tensor)]


def is_cut_again(tensor: Tensor) -> bool:
    """Return True if ``fully_shard`` has sharded a dimension of a DTensor that tensor parallelism had sharded."""
    return any(hasattr(placement, "split_factor") for placement in getattr(tensor, "placements", ()))


FSDP, DEEPSPEED, PIPELINE = "fsdp", "deepspeed", "balanced"
"""The engines that split modules, by the names of the strategies."""


def is_split(module: nn.Module) -> bool:
    """Return True if torch's ``fully_shard`` or tensor parallelism has sharded a module."""
    by_torch = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return by_torch or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def is_partitioned(parameter: Tensor) -> bool:
    """Return True if DeepSpeed has partitioned a parameter over the ranks."""
    return hasattr(parameter, "ds_id")


def partition_values(parameter: Any, rank: int) -> Tensor:
    """Return a rank's elements of a parameter that DeepSpeed has partitioned, without the padding at their end.

    The padding is memory that nobody writes, and may hold any values.
    """
    part: Tensor = parameter.ds_tensor.detach().flatten()
    return part[: max(0, parameter.ds_shape.numel() - rank * part.numel())]


def is_freed(module: nn.Module) -> bool:
    """Return True if a pipeline has freed weights of this module and has not restored them."""
    return any(stands_in(parameter) for parameter in module.parameters())


def cut_by(module: nn.Module) -> str:
    """Return the engine that has split a module, by marks on its parameters; "" if the module is whole."""
    if is_freed(module):
        return PIPELINE
    if is_split(module):
        return FSDP
    return DEEPSPEED if any(is_partitioned(parameter) for parameter in module.parameters()) else ""


def stands_in(parameter: Tensor) -> bool:
    """Return True if a parameter's values are only on another rank of its pipeline."""
    if is_lazy(parameter):
        return False
    strided = parameter.layout is torch.strided and not parameter.is_meta
    return strided and parameter.numel() > 1 and not any(parameter.stride())
