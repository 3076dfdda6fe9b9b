"""Optimizers that step inside the backward (``torch.distributed.optim._apply_optimizer_in_backward``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch.nn.parameter import Parameter

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
