"""Parameters that a module has under several names: found, and tied again after something has untied them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one, such as an embedding that is the output layer's weight too.

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
    """Give each list of names the parameter of its first one; gives the module.

    Args:
        module: changed in place.
        shared_params: as :func:`find_shared_parameters` gives them.
    """
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, parameter)
    return module
