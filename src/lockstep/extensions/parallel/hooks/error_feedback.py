"""Tensors that communication hooks store for each parameter, and functions that save and load a hook's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import torch_name

# -- memory --------------------------------------------------------------------------------------------------


Record = dict[str, Tensor]


class Memory:
    """Store of the named tensors that a communication hook needs for each parameter, saved by bucket and position.

    A checkpoint cannot refer to parameters, so it has the records by bucket and place. Its bucket plan is restored
    before the records are used.
    """

    def __init__(self) -> None:
        # by parameter: the layout changes after the first round, and when parameters are unfrozen
        self._records: Any = WeakIdKeyDictionary()
        self._layout: dict[int, list[Record]] = {}
        self._saved: dict[int, list[Record]] = {}

    def records(self, bucket: GradBucket) -> list[Record]:
        """Return a list with the record of each parameter in ``bucket``. The caller may change the records.

        Raises:
            ValueError: the loaded state was saved with another bucket layout.
        """
        parameters, index = bucket.parameters(), bucket.index()
        saved = self._saved.pop(index, None)
        if saved is not None:
            self._restore(saved, bucket)
        found = []
        for parameter in parameters:
            record = self._records.get(parameter)
            if record is None:
                record = self._records[parameter] = {}
            found.append(record)
        # a new round may have fewer buckets than the last one
        if bucket.index() == 0:
            self._layout.clear()
        self._layout[index] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.state_dict()}  # parameters are other objects in another process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(state["saved"])

    def _restore(self, saved: list[Record], bucket: GradBucket) -> None:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        index, way = bucket.index(), "Restore the bucket layout (reducer.replan), or do not load the state"
        if len(saved) != len(parameters):
            raise ValueError(
                f"the hook's state was saved with {len(saved)} parameters in bucket {index}, which has "
                f"{len(parameters)} now. {way}"
            )
        for place, (parameter, record) in enumerate(zip(parameters, saved, strict=True)):
            numbers = parameter.numel() * (2 if parameter.is_complex() else 1)
            if "error" in record and record["error"].numel() != numbers:
                raise ValueError(
                    f"the hook's state was saved with {record['error'].numel()} numbers for parameter {place} of "
                    f"bucket {index}, but this parameter has {numbers} now. {way}"
                )
        for parameter, record in zip(parameters, saved, strict=True):
            self._records[parameter] = {name: value.to(buffer.device) for name, value in record.items()}

    @property
    def bytes(self) -> int:
        """Size of the records, in bytes."""
        return sum(value.nbytes for record in self._records.values() for value in record.values())

    def state_dict(self) -> dict[int, list[Record]]:
        """Return {bucket index: list of the records of the bucket's parameters}, with copies of the tensors."""
        layout = {**self._layout, **self._saved}
        return {
            index: [{name: value.detach().clone() for name, value in record.items()} for record in records]
            for index, records in sorted(layout.items())
        }

    def load_state_dict(self, saved: dict[int, list[Record]]) -> None:
        """Load the result of `state_dict`. Each parameter gets its record when its bucket is first used."""
        self._records.clear()
        self._layout.clear()
        self._saved = {
            int(index): [{name: value.clone() for name, value in record.items()} for record in records]
            for index, records in saved.items()
        }


# -- saved state ---------------------------------------------------------------------------------------------


_ERRORS = ("error", "error_dict")
_TENSORS_OF_POWER_SGD = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS_OF_POWER_SGD = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


def save_state(state: Any) -> dict[str, Any] | None:
    """Return the contents of this rank's ``state`` as tensors (copies) and plain types.

    Returns:
        None for states without a memory: a process group, None, an object without ``state_dict()``.
    """
    kind = torch_name(type(state))
    if kind == "PowerSGDState":
        saved: dict[str, Any] = {name: getattr(state, name) for name in _NUMBERS_OF_POWER_SGD}
        for name in _TENSORS_OF_POWER_SGD:
            saved[name] = {index: tensor.detach().clone() for index, tensor in getattr(state, name).items()}
        # plain types, also of numpy's random state: a checkpoint is read with weights_only=True
        name, keys, position, has_gauss, gauss = state.rng.get_state()
        saved["rng"] = {
            "name": str(name),
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
        return saved
    if kind == "PostLocalSGDState":
        return {"iter": state.iter}
    if callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None)):
        return dict(state.state_dict())
    return None


def load_state(state: Any, saved: dict[str, Any] | None, device: torch.device | None = None) -> None:
    """Restore ``state`` from the result of `save_state` on this rank.

    Args:
        state: a state of the same class with the same settings.
        saved: result of `save_state`; None does nothing.
        device: device of the gradients, to which tensors of torch's states are moved; None moves nothing.

    Raises:
        ValueError: ``state`` has no ``load_state_dict``, or ``saved`` is from another class.
    """
    if saved is None:
        return
    kind = torch_name(type(state))
    try:
        if kind == "PowerSGDState":
            for name in _NUMBERS_OF_POWER_SGD:
                setattr(state, name, saved[name])
            for name in _TENSORS_OF_POWER_SGD:
                setattr(state, name, {int(i): t.to(device or t.device, copy=True) for i, t in saved[name].items()})
            rng = saved["rng"]
            state.rng.set_state((rng["name"], rng["keys"].tolist(), rng["position"], rng["has_gauss"], rng["gauss"]))
        elif kind == "PostLocalSGDState":
            state.iter = saved["iter"]
        elif callable(getattr(state, "load_state_dict", None)):
            state.load_state_dict(saved)
        else:
            raise ValueError(
                f"the checkpoint has a communication hook's state ({', '.join(map(str, saved))}), but this run's state "
                f"({'None' if state is None else type(state).__qualname__}) has no load_state_dict. Resume with the "
                "hook and the state of the saved run"
            )
    except KeyError as error:
        raise ValueError(
            f"the checkpoint has a communication hook's state without {error}, so it was not saved from a "
            f"{type(state).__qualname__}. Resume with the hook and the state of the saved run"
        ) from None


def share_states(saved: Sequence[dict[str, Any] | None], world: int) -> list[dict[str, Any] | None]:
    """Convert the ranks' saved states for a run with a different number of ranks.

    If the number is the same, each rank gets its own state. Otherwise each gets the mean of all errors, which preserves
    the errors' mean over the ranks, and the first rank's other entries.
    """
    if len(saved) == world or not saved:
        return list(saved)
    merged = None if saved[0] is None else _merge(list(saved), False)
    return [merged] * world


def _merge(values: list[Any], errors: bool) -> Any:
    first = values[0]
    if isinstance(first, dict):
        alike = set(first).intersection(*values)
        return {**first, **{key: _merge([value[key] for value in values], errors or key in _ERRORS) for key in alike}}
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_merge(list(those), errors) for those in zip(*values, strict=True)]
    if errors and isinstance(first, Tensor):
        return torch.stack([value.cpu() for value in values]).mean(dim=0)
    return first
