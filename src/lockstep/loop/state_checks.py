"""Checks that a checkpoint fits this run: the same model, the same optimizers, and values of the right types.

Each part of a checkpoint is loaded by a function of this file, or inside `taking`. A malformed checkpoint raises one
kind of error; one of another run raises an error that names the first difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.checkpoint import frozen
from lockstep.checkpoint.damage import first_line
from lockstep.engines.engine import EngineState
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed
from lockstep.ground.optimizers import class_of
from lockstep.ground.parameters import loads_by_name, whole_shape
from lockstep.loop.session import Session
from lockstep.module import LightningModule


@contextmanager
def taking(path: object, what: str) -> Iterator[None]:
    """Convert errors in the ``with`` block, which loads a part of a checkpoint, to CorruptCheckpoint.

    Args:
        path: path of the checkpoint, for the message.
        what: name of the part, for the message.

    Raises:
        CorruptCheckpoint: the part is malformed.
    """
    try:
        yield
    except (MisconfigurationException, CorruptCheckpoint, RankFailed):  # they name what is wrong
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            f"The checkpoint {str(path)!r} is malformed: {what} cannot be loaded ({first_line(error)}). Resume "
            "from another checkpoint."
        ) from error


def load_weights(session: Session, saved: dict[str, Any], absent: Collection[str] = ()) -> None:
    """Load a state dict into the session's module. The module's ``strict_loading`` determines if names may be missing.

    Args:
        session: the session of the module.
        saved: a state dict.
        absent: parameters that were omitted from ``saved``.

    Raises:
        MisconfigurationException: the weights are from a different model; names the first tensor that differs.
    """
    module = session.module
    cause: RuntimeError | None = None
    # before torch loads anything: a module that was half loaded would be neither of the two models
    difference = _first_difference(module, saved, absent, certain=True) if loads_by_name(module) else None
    if difference is None:
        try:
            with frozen.lenient(module, absent):
                if session.places_first:
                    session.strategy.load(EngineState(saved))
                else:
                    module.load_state_dict(saved, strict=module.strict_loading)
            return
        except RuntimeError as error:
            difference, cause = _first_difference(module, saved, absent), error
            if difference is None:
                raise
    raise MisconfigurationException(
        f"trainer.{session.state.fn}(ckpt_path={str(session.ckpt_path)!r}): the checkpoint is from a different model, "
        f"not from this {type(module).__name__}: {difference}."
    ) from cause


def _first_difference(
    module: LightningModule, saved: dict[str, Any], absent: Collection[str], certain: bool = False
) -> str | None:
    """Describe the first tensor whose name or shape differs in ``saved``, and suggest a fix. Return None if all match.

    Args:
        module: module with a flag ``strict_loading``.
        saved: a state dict.
        absent: parameters that were omitted from ``saved``.
        certain: ignore differences that torch may accept.
    """
    own, strict = frozen.without(module.state_dict(), absent), module.strict_loading
    wholes = {name: whole_shape(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    way_out = "create the module as it was saved, or set its `strict_loading = False` to skip such names"
    for name, value in own.items():
        if name not in saved:
            if strict and not (certain and name.endswith("num_batches_tracked")):  # missing in old checkpoints
                return f"the checkpoint has no {name!r}; {way_out}"
            continue
        there, here = getattr(saved[name], "shape", None), wholes.get(name, getattr(value, "shape", None))
        of_old = certain and (there, here) == ((1,), ())  # old versions of torch saved a scalar as a vector
        if there != here and not of_old:
            shapes = f"the shape is {tuple(there or ())} in the checkpoint, and {tuple(here or ())} in this module"
            return f"size mismatch for {name!r}: {shapes}; create the module with the arguments of the saved one"
    extra = [name for name in saved if name not in own] if strict else []
    return f"the module has no {extra[0]!r}; {way_out}" if extra else None


def load_optimizer(optimizer: Optimizer, saved: dict[str, Any], kind: str | None, load: Callable[[], object]) -> None:
    """Load an optimizer's state. Raise if a different optimizer class saved it, since torch would not detect that.

    Args:
        optimizer: an optimizer of this run.
        saved: the saved state for this optimizer.
        kind: class name of the saved optimizer; None if the checkpoint does not have it (Lightning's checkpoints).
        load: function that loads the state.

    Raises:
        MisconfigurationException: class or parameter groups differ.
    """
    difference, cause = _other_class(optimizer, saved, kind), None
    if difference is None:
        difference, cause = _loaded(optimizer, saved, load)
    if difference is not None:
        raise MisconfigurationException(
            f"trainer.fit(ckpt_path=...): the optimizer in the checkpoint is not this {class_of(optimizer)}: "
            f"{difference}. Resume with the optimizer that wrote it; to continue with a different one, load the "
            "weights with `load_from_checkpoint` and fit without `ckpt_path`."
        ) from cause


def _loaded(
    optimizer: Optimizer, saved: dict[str, Any], load: Callable[[], object]
) -> tuple[str | None, ValueError | None]:
    """Load an optimizer's state. Return (None, None), or (difference, torch's error) if the parameter groups differ."""
    other_groups = _other_groups(optimizer, saved)
    if other_groups is None:
        _check_optimizer(optimizer, saved)
    expected = list(optimizer.defaults)  # torch adds "differentiable" to them when it loads
    try:
        load()
    except ValueError as error:  # torch's, for parameter groups that do not match
        if other_groups is None:
            raise
        return other_groups, error
    for group in optimizer.param_groups:
        for key in expected:
            if key not in group:
                raise TypeError(f"a parameter group has no {key!r}")
    return None, None


def _other_class(optimizer: Optimizer, saved: dict[str, Any], kind: str | None) -> str | None:
    """Describe how the class of the saved optimizer differs; return None if it is the same."""
    own = class_of(optimizer)
    if kind is not None:
        return None if kind == own else f"it was written by {kind}"
    for group in saved.get("param_groups", [])[:1]:
        known = {*optimizer.param_groups[0], "initial_lr", "param_names"}
        foreign = [key for key in group if key not in known]
        # a newer torch may have one setting more, or one less; another class has both
        if foreign and any(key not in group for key in optimizer.defaults):
            return f"it has the setting {foreign[0]!r}, which {own} does not have"
    return None


def _other_groups(optimizer: Optimizer, saved: dict[str, Any]) -> str | None:
    """Describe how the saved parameter groups differ; return None if they match."""
    theirs, ours = (
        [len(group["params"]) for group in groups] for groups in (saved.get("param_groups", []), optimizer.param_groups)
    )
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} parameter groups, but this optimizer has {len(ours)}"
    for i, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        if there != here:
            return f"its parameter group {i} has {there} parameters, but this optimizer's has {here}"
    return None


# -- malformed -------------------------------------------------------------------------------------------------


def check_types(saved: object, own: dict[str, Any], owner: type, *, optional: bool = False) -> None:
    """Raise if a value in the checkpoint's state ``saved`` differs in type from the value in this run's state ``own``.

    Args:
        saved: state from a checkpoint.
        own: state of the same object in this run.
        owner: class of the object; a saved key must not have the name of one of its methods.
        optional: accept None for any value, because a callback may assign a value only later.

    Raises:
        TypeError: names the first wrong key.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"it is a {type(saved).__name__}, not a dict")
    for key, value in saved.items():
        if key in own:
            if not (optional and value is None) and not _alike(own[key], value):
                raise TypeError(f"{key!r} is a {type(value).__name__}, not a {type(own[key]).__name__}")
        elif not isinstance(key, str) or callable(getattr(owner, key, None)):
            raise TypeError(f"{key!r} is not the name of a value")


def _alike(own: object, saved: object) -> bool:
    if own is None:  # a value that is not set yet; of tensors, only one number
        return not isinstance(saved, torch.Tensor) or saved.numel() == 1
    if isinstance(own, bool):
        return isinstance(saved, int) and saved in (True, False)
    if isinstance(own, (int, float)):
        return _is_number(saved)
    if isinstance(own, tuple) and isinstance(saved, (list, tuple)):
        return len(own) == len(saved) and all(map(_alike, own, saved))
    kinds = next((kinds for kinds in _KINDS if isinstance(own, kinds)), object)
    return saved is None or isinstance(saved, kinds)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


_KINDS: tuple[tuple[type, ...], ...] = ((int, float, torch.Tensor), (list, tuple), (dict,), (str,))
"""Groups of types that are interchangeable."""


def _check_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Raise if a saved state of one of torch's optimizers is malformed. Other optimizers are not checked.

    Raises:
        TypeError: names the wrong value.
    """
    # a resume alone needs it
    from lockstep.engines.owners import NOT_ELEMENTWISE

    if not type(optimizer).__module__.startswith("torch.optim.") or type(optimizer).__name__ in NOT_ELEMENTWISE:
        return
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        chosen = {key: value for key, value in group.items() if value is not None or key not in _TORCH_CHOOSES}
        check_types(chosen, own, type(None))
        _check_states({number: saved["state"].get(number, {}) for number in group["params"]}, own["params"])


def _check_states(states: dict[int, Any], parameters: list[torch.Tensor]) -> None:
    """Raise if a parameter's optimizer state has missing values or wrong shapes, for the parameters of one group."""
    for number, state in states.items():
        if not isinstance(state, dict):
            raise TypeError(f"the state of parameter {number} is a {type(state).__name__}, not a dict")
    names = set().union(*states.values())  # torch fails at the first step, far from the cause, if one is missing
    for (number, state), parameter in zip(states.items(), parameters, strict=True):
        missing = names - state.keys() if state else ()
        if missing:
            raise TypeError(f"parameter {number} has no {min(missing)!r}")
        for name, value in state.items():
            if name in _NUMBERS:
                is_valid = _is_number(value) and float(value) >= 0
            else:
                is_tensor = isinstance(value, torch.Tensor) and value.shape == whole_shape(parameter)
                is_valid = value is None or is_tensor
            if not is_valid:
                what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise TypeError(f"{name!r} of parameter {number} has the wrong type or shape ({what})")


_TORCH_CHOOSES = ("foreach", "fused")
"""Optimizer options that may be None, which lets torch choose. Two runs may differ in these options."""
_NUMBERS = ("step", "eta", "mu", "mu_product")
"""Single numbers in the states of torch's optimizers; all other entries have the parameter's shape."""
