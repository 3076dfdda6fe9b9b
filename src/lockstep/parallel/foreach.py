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
    """Let an optimizer update one parameter after another where parameters are of several kinds.

    What the user has chosen for a group stays. Groups that are added and states that are loaded later are met, too.

    Args:
        optimizer: that is to update them.
        parameters: of the module, also those that are added later.
    """
    if "foreach" not in optimizer.defaults or len({_kind(each) for each in parameters}) < 2:
        return
    if optimizer.defaults["foreach"] is None:
        optimizer.defaults["foreach"] = False
    _choose(optimizer)
    optimizer.register_load_state_dict_post_hook(_choose)


def _choose(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("foreach") is None and not group.get("fused"):
            group["foreach"] = False


def _kind(parameter: Any) -> Any:
    """None for a whole tensor, else the mesh of its parts."""
    return getattr(parameter, "device_mesh", None)
