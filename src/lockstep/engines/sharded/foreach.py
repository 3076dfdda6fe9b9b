"""Optimizers that update whole parameters and shards: torch's foreach functions accept only tensors of one kind.

On devices other than the CPU, torch's optimizers use these functions by default for all parameters of a kind of device.
They do not check whether a parameter is a DTensor, or on which mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def update_one_by_one(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Make an optimizer update parameters one by one if those on a device are of several kinds.

    A choice of the user is kept. Groups that are added and states that are loaded later are changed too. Saved states
    do not show the change.

    Args:
        optimizer: the optimizer.
        parameters: parameters of the module, including those that are added to the optimizer later.
    """
    kinds = {_kind(each) for each in parameters if each.device.type != "cpu"}
    if optimizer.defaults.get("foreach", False) is not None or len(kinds) < 2:
        return
    optimizer.defaults["foreach"] = False
    _choose(optimizer)
    optimizer.register_load_state_dict_post_hook(_choose)
    optimizer.register_state_dict_post_hook(_say_nothing)


def _choose(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("foreach") is None and not group.get("fused"):
            group["foreach"] = False


def _say_nothing(optimizer: Optimizer, state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        if group.get("foreach") is False:
            group["foreach"] = None


def _kind(parameter: Any) -> Any:
    """Return the mesh of a DTensor, or None for a whole tensor."""
    return getattr(parameter, "device_mesh", None)
