"""Optimizers that update whole parameters beside parts: torch's foreach functions take tensors of one kind alone.

On devices other than the CPU torch's optimizers update all parameters of a kind of device by such functions, if nobody
says otherwise, and do not look whether a parameter is a DTensor, and of which mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def update_one_by_one(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Let an optimizer update one parameter after another where those on a device are of several kinds.

    What the user has chosen stays. Groups that are added and states that are loaded later are met, too; the states
    that are saved say nothing of it.

    Args:
        optimizer: that is to update them.
        parameters: of the module, also those that are added later.
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
    """None for a whole tensor, else the mesh of its parts."""
    return getattr(parameter, "device_mesh", None)
