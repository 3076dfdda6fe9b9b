"""The plain form of a value: what stands for it where no code may be, as in a checkpoint."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch

#: kept as they are, and nothing inside to look at
LEAVES: frozenset[type] = frozenset({type(None), bool, float, complex, str, torch.device, torch.dtype, torch.Size})
TENSORS: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})


class NotPlain(TypeError):
    """A value that has no plain form.

    Attributes:
        value: what it is that has none.
        keys: the way to it from the value that was asked about.
    """

    def __init__(self, value: object, keys: tuple[Any, ...]) -> None:
        super().__init__(f"{described(value)} has no plain form")
        self.value = value
        self.keys = keys


def plain(value: object) -> Any:
    """`value` in tensors, numbers, strings, and dicts, lists, tuples, sets of them; its containers are copied.

    A path becomes a string, an ``Enum`` its value, a ``Namespace``, dataclass or other mapping a dict, a NumPy number a
    Python number, an array a tensor, a named tuple a tuple, any other sequence a list.

    Raises:
        NotPlain: something in it is a function, a class, or an object of another class.
    """
    return _plain(value, (), frozenset())


def _plain(value: object, keys: tuple[Any, ...], around: frozenset[int]) -> Any:
    kind = type(value)
    if kind in LEAVES or kind in TENSORS or (type(value) is int and value.bit_length() < 64):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, keys, around)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if id(value) in around:  # it holds itself
        raise NotPlain(value, keys)
    around |= {id(value)}
    if isinstance(value, Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = list(value.items())
        return {_plain(key, (*keys, key), around): _plain(item, (*keys, key), around) for key, item in items}
    if isinstance(value, (tuple, set, frozenset)) or (isinstance(value, Sequence) and not isinstance(value, _TEXTS)):
        forms = [_plain(item, (*keys, place), around) for place, item in enumerate(value)]
        return tuple(forms) if isinstance(value, tuple) else forms if isinstance(value, Sequence) else set(forms)
    return _other(value, keys)


_TEXTS = (str, bytes, bytearray, memoryview)


def _other(value: object, keys: tuple[Any, ...]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        if type(number) in LEAVES or type(number) is int:  # dates and long doubles have no plain equal
            return number
    elif numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.kind in "biufc":
            return torch.as_tensor(value)
    else:
        for base in (str, int, float):
            if isinstance(value, base) and type(value) is not base:
                return base(value)
        if can_be_read_back(value):
            return value
    raise NotPlain(value, keys)


def can_be_read_back(value: object) -> bool:
    """Whether ``torch.load(weights_only=True)`` gives back what ``torch.save`` writes of `value`; tried out."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError, ValueError, ImportError):
        return False
    return True


def described(value: object) -> str:
    """What `value` is, with its article: "the class torch.optim.Adam", "a function"."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    cls = type(value)
    return "a " + f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
