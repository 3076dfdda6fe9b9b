"""What a checkpoint may hold: decided by key, before anything is written."""

from __future__ import annotations

import collections
import copy
import json
import sys
from typing import Any, cast

import torch

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict
from lockstep.ground.plain import LEAVES, TENSORS, can_be_read_back, described

_DICTS: frozenset[Any] = frozenset((dict, collections.OrderedDict, AttributeDict))
_SEQUENCES: frozenset[Any] = frozenset((list, tuple, set))

#: The keys from the checkpoint to a value in it.
Keys = tuple[Any, ...]


def readable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """`checkpoint` itself, or a copy of its containers in which what has a plain equal is replaced by it.

    A NumPy number becomes a Python number, an ``AttributeDict`` a dict. No tensor is copied or looked into.

    Raises:
        MisconfigurationException: ``torch.load(weights_only=True)`` could not read something in it; the
            message names its key, what it is, and the way out.
    """
    result = _readable(checkpoint, (), {})
    assert isinstance(result, dict)
    return result


def _readable(value: object, keys: Keys, done: dict[int, tuple[Any, Any]]) -> Any:
    """`value` in a form that can be read back.

    `done` holds the containers met so far and their forms, by id: one that is there twice stays one, and one
    that holds itself comes to an end.
    """
    kind = type(value)
    if kind in LEAVES or (isinstance(value, int) and kind is int and value.bit_length() < 64):
        return value
    if kind in TENSORS:
        if vars(value):  # a tensor takes its Python attributes along
            _readable(vars(value), (*keys, "__dict__"), done)
        return value
    if kind not in _DICTS and kind not in _SEQUENCES:
        return _readable_other(value, keys)
    if id(value) not in done:
        done[id(value)] = (value, value)
        form = (
            _mapping(value, keys, done) if isinstance(value, dict) else _sequence(cast("list[Any]", value), keys, done)
        )
        done[id(value)] = (value, form)
    return done[id(value)][1]


def _mapping(value: dict[Any, Any], keys: Keys, done: dict[int, tuple[Any, Any]]) -> dict[Any, Any]:
    changed = {}
    for key, item in value.items():
        new_key = _readable(key, (*keys, key), done)
        form = _readable(item, (*keys, key), done)
        if form is not item or new_key is not key:
            changed[key] = (new_key, form)
    if isinstance(value, collections.OrderedDict) and vars(value):  # a state_dict has its _metadata there
        _readable(vars(value), (*keys, "__dict__"), done)
    if isinstance(value, AttributeDict):
        value = dict(value)
    if not changed:
        return value
    result = copy.copy(value)  # an OrderedDict keeps its attributes
    result.clear()
    for key, item in value.items():
        new_key, form = changed.get(key, (key, item))
        result[new_key] = form
    return result


def _sequence(value: list[Any], keys: Keys, done: dict[int, tuple[Any, Any]]) -> list[Any]:
    """The same for a list, a tuple or a set."""
    forms = [_readable(item, (*keys, index), done) for index, item in enumerate(value)]
    unchanged = all(form is item for form, item in zip(forms, value, strict=True))
    return value if unchanged else type(value)(forms)


def _readable_other(value: object, keys: Keys) -> Any:
    """The form of a value of an uncommon type, which is tried out if nothing is known of it."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        plain = value.item()
        if type(plain) in LEAVES or type(plain) is int:  # dates and long doubles have no plain equal
            return plain
    if isinstance(value, torch.Tensor):  # of a subclass, whose data shall not be copied to try it
        safe = torch.serialization.get_safe_globals()
        if any(type(value) is (known[0] if isinstance(known, tuple) else known) for known in safe):
            return value
    elif (numpy is None or not isinstance(value, numpy.ndarray)) and can_be_read_back(value):
        return value
    raise _refused(value, keys)


def _refused(value: object, keys: Keys) -> MisconfigurationException:
    """The error for `value`, which is at `keys` (or a key there)."""
    where = "".join(f"[{json.dumps(key)}]" if isinstance(key, str) else f"[{key!r}]" for key in keys)
    return MisconfigurationException(
        f"checkpoint{where} is {described(value)}, which a checkpoint cannot hold: checkpoints carry no code and are "
        f"read with weights_only=True. Instead, {' or '.join(_ways_out(value, keys))}."
    )


def _ways_out(value: object, keys: Keys) -> list[str]:
    ways = []
    if hasattr(value, "__fspath__"):
        ways.append("make it a string by str(...)")
    elif hasattr(value, "__array__") and hasattr(value, "tolist"):
        ways.append("make it a tensor by torch.as_tensor(...), or a list by .tolist()")
    elif isinstance(value, dict):
        ways.append("make it a plain dict by dict(...)")
    elif isinstance(value, (list, tuple, frozenset)):
        ways.append("make it a plain list or tuple")
    elif callable(value):
        ways.append("keep its name, a string")
    if len(keys) > 1 and keys[0] in ("hyper_parameters", "datamodule_hyper_parameters"):
        ways.append(f"leave it out by save_hyperparameters(ignore=[{keys[1]!r}])")
    cls = value if isinstance(value, type) else type(value)
    if cls.__module__ != "builtins":
        name = f"{cls.__module__}.{cls.__qualname__}"
        ways.append(f"allow its class by torch.serialization.add_safe_globals([{name}])")
    return ways or ["keep tensors, numbers, strings, and dicts, lists or tuples of them"]
