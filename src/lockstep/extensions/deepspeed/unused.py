"""Wrapper of DeepSpeed's step that restores parameters without a gradient, and their optimizer states.

DeepSpeed concatenates the parameters of a group and steps all of them; weight decay and momentum would also move
those that are frozen or unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.ground.errors import MisconfigurationException

COUNTED = (
    "DeepSpeed: parameter {name!r} has a gradient again after steps without one. {kind} counts steps per parameter "
    "group here, so the update would differ from one process. Put parameters that are not trained in each step into a "
    'parameter group of their own in `configure_optimizers`, or use strategy="fsdp".'
)
SWAPPED = (
    "DeepSpeed: parameter {name!r} has no gradient in this step (it is frozen or unused), but would be updated, since "
    "the states of {kind} are on a disk. Offload to the CPU, or remove the parameter from the optimizer."
)


class UnusedParameters:
    """Wrapper of the engine's step that afterwards restores parameters without a gradient and their optimizer states.

    Args:
        optimizer: the optimizer that steps; its parameters are the engine's float32 tensors.
        flats: the engine's float32 tensors.
        groups: for each tensor in ``flats``, the parameters whose shards it contains.
        pieces: this rank's shards, by the parameter's id.
        names: names of all trained parameters, by id.
        swaps: True if the optimizer's states are on a disk between steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        flats: Sequence[Tensor],
        groups: Sequence[Sequence[Parameter]],
        pieces: Mapping[int, Any],
        names: Mapping[int, str],
        swaps: bool,
    ) -> None:
        self._optimizer, self._flats, self._pieces = optimizer, flats, pieces
        self._groups, self._names, self._swaps = groups, names, swaps
        self._kind = type(optimizer).__name__
        self._missed: set[int] = set()  # ids of parameters that missed a step which others of their group took

    def step(self, used: set[int], step: Callable[[], object]) -> None:
        """Call the engine's ``step``, then restore the parameters without a gradient and their optimizer states.

        Args:
            used: ids of the parameters with a gradient; the same parameters on all ranks.
            step: the engine's step.

        Raises:
            MisconfigurationException: on all ranks, if the update would differ from one process.
        """
        # the group's step count includes the steps that the parameter missed, so Adam's bias correction would be wrong
        again = [key for key in self._names if key in self._missed and key in used]
        if again:
            raise MisconfigurationException(COUNTED.format(name=self._names[again[0]], kind=self._kind))
        idle: list[tuple[Tensor, dict[str, Any]]] = []
        parts: list[tuple[Parameter, Tensor, Any]] = []
        for flat, group in zip(self._flats, self._groups, strict=True):
            unused = [parameter for parameter in group if id(parameter) not in used]
            if unused and self._swaps:
                raise MisconfigurationException(SWAPPED.format(name=self._names[id(unused[0])], kind=self._kind))
            parts += [(parameter, flat, self._copy_values(parameter, flat)) for parameter in unused]
            # on one process the step count of a group without any gradient would not increase
            if len(unused) == len(group):
                state = self._optimizer.state.get(flat, {})
                idle.append((flat, {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}))
        step()
        with torch.no_grad():
            for parameter, flat, kept in parts:
                self._restore(parameter, flat, kept)
        for flat, state in idle:
            self._optimizer.state[flat] = state
        uncounted = {id(flat) for flat, _ in idle}
        for parameter, flat, _ in parts:
            # an optimizer that counts steps has a state which is not a value per element
            counts = len(self._flat_states(flat)) < len(self._optimizer.state.get(flat, {}))
            if counts and id(flat) not in uncounted:
                self._missed.add(id(parameter))

    def _flat_states(self, flat: Tensor) -> dict[str, Tensor]:
        state = self._optimizer.state.get(flat, {})
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == flat.shape and v.dim() == 1}

    def _copy_values(self, parameter: Any, flat: Tensor) -> tuple[list[Tensor], Tensor | None, dict[str, Tensor]]:
        """Return copies of a parameter's (values in the module, float32 shard on this rank, optimizer states)."""
        piece = self._pieces.get(id(parameter))
        module = [values.clone() for values in _values(parameter)]
        if piece is None:
            return module, None, {}
        state = {key: piece.of(value).clone() for key, value in self._flat_states(flat).items()}
        return module, piece.of(flat).detach().clone(), state

    def _restore(
        self, parameter: Any, flat: Tensor, kept: tuple[list[Tensor], Tensor | None, dict[str, Tensor]]
    ) -> None:
        module, part, states = kept
        now = _values(parameter)
        for values, before in zip(now, module, strict=False):
            values.copy_(before)
        # stage 3 gathered it after the update, with the moved values; the next forward gathers the restored shards
        if len(now) > len(module):
            parameter.partition()
        piece = self._pieces.get(id(parameter))
        if piece is None or part is None:
            return
        piece.of(flat).copy_(part)
        for key, value in self._flat_states(flat).items():
            mine = piece.of(value)
            mine.copy_(states.get(key, torch.zeros_like(mine)))


def _values(parameter: Any) -> list[Tensor]:
    """Return the tensors with a parameter's values: the shard in stage 3, and the full tensor if it is in memory."""
    part = getattr(parameter, "ds_tensor", None)
    whole = [parameter.detach()] if parameter.numel() else []
    return whole if part is None else [part.detach(), *whole]
