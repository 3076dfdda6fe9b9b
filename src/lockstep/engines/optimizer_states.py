"""Where an optimizer's states are: with its parameters while a fit runs, on the CPU behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.ground.tree import tree_map


def states_to_cpu(optimizer: Optimizer) -> None:
    """Bring the states to the CPU, but for single numbers: where a count of steps is, the optimizer has chosen."""
    cpu = torch.device("cpu")
    _map_states(optimizer, lambda _, value: value.to(cpu) if value.dim() else value)


def states_to_parameters(optimizer: Optimizer) -> None:
    """Bring states that an earlier fit has left on the CPU to the devices of their parameters."""

    def bring(parameter: Tensor, value: Tensor) -> Tensor:
        stays = not value.dim() or value.device.type != "cpu"
        return value if stays else value.to(parameter.device)

    _map_states(optimizer, bring)


def _map_states(optimizer: Optimizer, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    states: Any = getattr(optimizer, "state", None)  # of one that is not torch's it may be anything
    for parameter, state in [*states.items()] if isinstance(states, Mapping) else []:
        if not isinstance(parameter, Tensor):
            continue
        changed = tree_map(partial(change, parameter), state, Tensor)
        if isinstance(state, dict):
            state.update(changed)
        else:
            states[parameter] = changed
