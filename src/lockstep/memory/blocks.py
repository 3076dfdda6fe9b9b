"""Selection of a model's blocks: its repeated layers, or layers that a policy selects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from torch import nn

Policy = Collection[type[nn.Module]] | Callable[..., bool]
"""Classes of layers, or a function of torch's first FSDP: ``policy(module, recurse, nonwrapped_numel)``."""


def find_blocks(root: nn.Module) -> list[nn.Module]:
    """Return a model's outermost repeated blocks: sibling layers of the same class that contain other layers.

    Example:
        >>> layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
        >>> [type(block).__name__ for block in find_blocks(layers)]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    found: list[nn.Module] = []
    composite = [child for child in root.children() if any(True for _ in child.children()) and _has_parameters(child)]
    kinds = Counter(type(child) for child in composite if not isinstance(child, _CONTAINERS))
    for child in composite:
        if kinds[type(child)] > 1:
            found.append(child)
        else:
            found += find_blocks(child)
    # a block that shares a parameter with layers outside of it cannot be gathered separately
    return [block for block in found if _shared(root, block) is None]


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks_by(policy: Policy, root: nn.Module, alone: bool = True) -> list[nn.Module]:
    """Return the layers below ``root`` that a policy selects, inner layers first.

    Args:
        policy: classes, or a function.
        root: the model.
        alone: raise if a selected layer shares a parameter with layers outside of it.

    Raises:
        ValueError: the policy selects no layer, or one that shares a parameter with layers outside of it.
    """
    if isinstance(policy, Collection):
        # reversed: `fully_shard` must be called on inner layers first
        kinds = tuple(policy)
        found = [m for m in root.modules() if m is not root and isinstance(m, kinds)]
        found.reverse()
    else:
        found = _by_function(policy, root)[0]
    if not found:
        names = sorted({type(module).__name__ for module in root.modules() if module is not root})
        raise ValueError(
            f"no layer of {type(root).__name__} is selected; the classes of its layers are {', '.join(names)}"
        )
    for block in found if alone else ():
        shared = _shared(root, block)
        if shared is not None:
            raise ValueError(
                f"the selected layer {type(block).__name__} shares its parameter {shared[0]!r} with {shared[1]!r} "
                "outside of the layer. Select a layer that contains both, or neither"
            )
    return found


def _by_function(policy: Callable[..., bool], module: nn.Module) -> tuple[list[nn.Module], int]:
    """Return (layers, count): the layers that a policy function selects, and the number of other parameter elements.

    The policy is called as in torch's first FSDP: should it descend into a layer, and should the rest be a group?
    """
    found: list[nn.Module] = []
    ungrouped = sum(parameter.numel() for parameter in module.parameters())
    for child in module.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        if size and policy(module=child, recurse=True, nonwrapped_numel=size):
            inner, rest = _by_function(policy, child)
            found += inner
            if policy(module=child, recurse=False, nonwrapped_numel=rest):
                found.append(child)
                rest = 0
            ungrouped -= size - rest
    return found, ungrouped


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _shared(root: nn.Module, block: nn.Module) -> tuple[str, str] | None:
    """Return (name in the block, name outside) of a parameter that a block shares with other layers, or None."""
    inside = {id(layer) for layer in block.modules()}
    own = {id(p): name for name, p in block.named_parameters()}
    for prefix, layer in root.named_modules():
        if id(layer) in inside:
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in own:
                return own[id(parameter)], f"{prefix}.{name}".lstrip(".")
    return None
