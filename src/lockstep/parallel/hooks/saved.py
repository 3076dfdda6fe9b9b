"""The state of a communication hook as plain data, and back: lockstep's states, torch's, and users' own.

Errors that are fed back belong to a rank, so every rank saves its own and loads its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.hooks.identity import torch_name

_ERRORS = ("error", "error_dict")
_TENSORS_OF_POWER_SGD = ("error_dict", "p_memory_dict", "q_memory_dict")
_NUMBERS_OF_POWER_SGD = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


def save_state(state: Any) -> dict[str, Any] | None:
    """What this rank's ``state`` holds: tensors (copies) and plain types.

    Returns:
        None for states without a memory: a process group, None, an object without ``state_dict()``.
    """
    kind = torch_name(type(state))
    if kind == "PowerSGDState":
        saved: dict[str, Any] = {name: getattr(state, name) for name in _NUMBERS_OF_POWER_SGD}
        for name in _TENSORS_OF_POWER_SGD:
            saved[name] = {index: tensor.detach().clone() for index, tensor in getattr(state, name).items()}
        saved["rng"] = _save_numpy(state.rng)
        return saved
    if kind == "PostLocalSGDState":
        return {"iter": state.iter}
    if callable(getattr(state, "state_dict", None)) and callable(getattr(state, "load_state_dict", None)):
        return dict(state.state_dict())
    return None


def load_state(state: Any, saved: dict[str, Any] | None, device: torch.device | None = None) -> None:
    """Let ``state`` go on from what `save_state` gave on this rank.

    Args:
        state: one of the same class, made with the same settings.
        saved: of `save_state`; None does nothing.
        device: where gradients are, for torch's states, which do not look; by default tensors stay where they are.

    Raises:
        ValueError: ``state`` has nothing to load into, or ``saved`` is another class's.
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
            _load_numpy(state.rng, saved["rng"])
        elif kind == "PostLocalSGDState":
            state.iter = saved["iter"]
        elif callable(getattr(state, "load_state_dict", None)):
            state.load_state_dict(saved)
        else:
            raise ValueError(
                f"the checkpoint holds a communication hook's state ({', '.join(map(str, saved))}), and this run's "
                f"({'None' if state is None else type(state).__qualname__}) has no load_state_dict: resume with the "
                "hook and the state of that run"
            )
    except KeyError as error:
        raise ValueError(
            f"the checkpoint holds a communication hook's state without {error}: it belongs to another class than "
            f"{type(state).__qualname__}; resume with the hook and the state of that run"
        ) from None


def share_states(saved: Sequence[dict[str, Any] | None], world: int) -> list[dict[str, Any] | None]:
    """What ranks saved, for another number of ranks.

    With as many ranks each gets its own. With another number, each gets the mean of all errors, so that the errors'
    mean over ranks, which is owed to the gradients, stays what it was; all else is alike on all ranks.

    Args:
        saved: of `save_state`, by rank.
        world: how many ranks there are now.
    """
    if len(saved) == world or not saved:
        return list(saved)
    merged = None if saved[0] is None else _merged(list(saved), False)
    return [merged] * world


def _merged(values: list[Any], errors: bool) -> Any:
    first = values[0]
    if isinstance(first, dict):
        alike = (key for key in first if all(key in value for value in values))
        return {**first, **{key: _merged([value[key] for value in values], errors or key in _ERRORS) for key in alike}}
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_merged(list(those), errors) for those in zip(*values, strict=True)]
    if errors and isinstance(first, Tensor):
        return torch.stack([value.cpu() for value in values]).mean(dim=0)
    return first


def _save_numpy(rng: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = rng.get_state()
    return {
        "name": str(name),
        "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _load_numpy(rng: Any, saved: dict[str, Any]) -> None:
    keys = saved["keys"].tolist()
    rng.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
