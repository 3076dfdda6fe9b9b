"""Loads weights and optimizers from a checkpoint, and says in words where they are not those of this run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.checkpoint.format import described
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed


@contextmanager
def taking(path: Any, what: str) -> Iterator[None]:
    """While a part of a checkpoint is taken over: what a malformed one makes of it is one kind of error.

    Args:
        path: of the file, for the message.
        what: the part.

    Raises:
        CorruptCheckpoint: in place of any other error.
    """
    try:
        yield
    except (MisconfigurationException, CorruptCheckpoint, RankFailed):
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            f"The checkpoint {str(path)!r} is malformed: {what} cannot be taken over ({described(error)}). Resume from "
            "another checkpoint."
        ) from error


def load_weights(trainer: Any, module: Any, saved: dict[str, Any]) -> None:
    """``module.load_state_dict``, by the module's own ``strict_loading``.

    Raises:
        MisconfigurationException: for the weights of another model, with the first tensor that differs.
    """
    strict = module.strict_loading
    try:
        module.load_state_dict(saved, strict=strict)
    except RuntimeError as error:
        difference = _first_difference(module.state_dict(), saved, strict)
        if difference is None:
            raise
        raise MisconfigurationException(
            f"trainer.{trainer.state.fn}(ckpt_path={str(trainer.ckpt_path)!r}): the checkpoint is of another model "
            f"than this {type(module).__name__}: {difference}."
        ) from error


def _first_difference(own: dict[str, Any], saved: dict[str, Any], strict: bool) -> str | None:
    """The first tensor that does not match, and what to do about it."""
    way_out = "make the module as it was saved, or set its `strict_loading = False` to leave out what differs"
    for name, value in own.items():
        if name not in saved:
            if strict:
                return f"the checkpoint has no {name!r}; {way_out}"
        elif getattr(value, "shape", None) != getattr(saved[name], "shape", None):
            shapes = f"{tuple(saved[name].shape)} in the checkpoint and {tuple(value.shape)} here"
            return f"{name!r} has the shape {shapes}; make the module with the arguments that it had"
    extra = [name for name in saved if name not in own] if strict else []
    return f"the module has no {extra[0]!r}; {way_out}" if extra else None


def load_optimizer(optimizer: Any, saved: dict[str, Any], kind: str | None) -> None:
    """``optimizer.load_state_dict``, which would take the state of another class of optimizer without a word.

    Args:
        optimizer: of this run.
        saved: what was saved of the optimizer in its place.
        kind: the name of that one's class; None where the checkpoint does not say (Lightning's).

    Raises:
        MisconfigurationException: with what is different.
    """
    difference = _other_class(optimizer, saved, kind)
    if difference is None:
        try:
            malformed = _malformed_optimizer(optimizer, saved) if _other_groups(optimizer, saved) is None else None
            if malformed is None:
                optimizer.load_state_dict(saved)
                gone = [key for key in optimizer.defaults for group in optimizer.param_groups if key not in group]
                malformed = f"a parameter group has no {gone[0]!r}" if gone else None
            if malformed is not None:
                raise TypeError(malformed)
            return
        except ValueError as error:  # torch's, for parameter groups that do not match
            difference = _other_groups(optimizer, saved)
            if difference is None:
                raise
            cause: ValueError | None = error
    else:
        cause = None
    raise MisconfigurationException(
        f"trainer.fit(ckpt_path=...): the optimizer in the checkpoint is not this {type(optimizer).__name__}: "
        f"{difference}. Resume with the optimizer that wrote it; to go on with another one, load the weights by "
        "`load_from_checkpoint` and fit without `ckpt_path`."
    ) from cause


def _other_class(optimizer: Any, saved: dict[str, Any], kind: str | None) -> str | None:
    own = type(optimizer).__name__
    if kind is not None:
        return None if kind == own else f"it was written by {kind}"
    for group in saved.get("param_groups", [])[:1]:
        known = {*optimizer.param_groups[0], "initial_lr", "param_names"}
        foreign = [key for key in group if key not in known]
        # a newer torch may have one setting more, or one less; another class has both
        if foreign and any(key not in group for key in optimizer.defaults):
            return f"it has the setting {foreign[0]!r}, which {own} does not know"
    return None


def _other_groups(optimizer: Any, saved: dict[str, Any]) -> str | None:
    theirs, ours = (
        [len(group["params"]) for group in groups] for groups in (saved.get("param_groups", []), optimizer.param_groups)
    )
    if len(theirs) != len(ours):
        return f"it has {len(theirs)} parameter groups, this one {len(ours)}"
    for i, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        if there != here:
            return f"its parameter group {i} has {there} parameters, that of this one {here}"
    return None


# -- malformed -------------------------------------------------------------------------------------------------


def check_types(saved: Any, own: Any, owner: type) -> None:
    """Refuse a state whose values are of other types than those that this run would save in their place.

    Args:
        saved: from a checkpoint.
        own: the state of the same object in this run.
        owner: its class, whose methods no value may hide.

    Raises:
        TypeError: with the first key.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"it is a {type(saved).__name__}, not a dict")
    for key, value in saved.items():
        if key in own:
            if not _alike(own[key], value):
                raise TypeError(f"{key!r} is a {type(value).__name__}, not a {type(own[key]).__name__}")
        elif not isinstance(key, str) or callable(getattr(owner, key, None)):
            raise TypeError(f"{key!r} is the name of no value")


def _alike(own: Any, saved: Any) -> bool:
    if own is None or (saved is None and not isinstance(own, (int, float))):
        return True
    if isinstance(own, bool):
        return saved in (True, False) if isinstance(saved, int) else False
    if isinstance(own, (int, float)) and isinstance(saved, torch.Tensor):
        return saved.numel() == 1
    for kinds in ((bool, int, float, torch.Tensor), (list, tuple), (dict,), (str,)):
        if isinstance(own, kinds):
            alike = isinstance(saved, kinds)
            if alike and isinstance(own, tuple):
                return len(own) == len(saved) and all(map(_alike, own, saved))
            return alike
    return True


def _malformed_optimizer(optimizer: Any, saved: Any) -> str | None:
    """What is wrong with the state of one of torch's optimizers; others keep what they like."""
    if not type(optimizer).__module__.startswith("torch.optim.") or type(optimizer).__name__ in _OTHER_SHAPES:
        return None
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        check_types(group, own, type(None))
        states = [saved["state"].get(number, {}) for number in group["params"]]
        names = {name for state in states for name in state}
        for number, parameter, state in zip(group["params"], own["params"], states, strict=True):
            for name in names if state else ():
                value = state.get(name, _MISSING)
                if value is _MISSING:
                    return f"parameter {number} has no {name!r}"
                if name in _NUMBERS:
                    well = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
                    well = well and float(value) >= 0
                else:
                    well = value is None or (isinstance(value, torch.Tensor) and value.shape == parameter.shape)
                if not well:
                    what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                    return f"{name!r} of parameter {number} is of another kind ({what})"
    return None


_MISSING = object()
_OTHER_SHAPES = ("LBFGS", "Adafactor", "SparseAdam", "Muon")
"""Optimizers of torch's whose states are not looked into."""
_NUMBERS = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers keep of a parameter as one number; all else has the parameter's shape."""
