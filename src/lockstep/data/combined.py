"""CombinedLoader: several loaders drawn from together, in one of four modes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lockstep.data.sampler import length_of

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]

LENGTHS: dict[str, Callable[[Iterable[int | float]], int | float]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}
"""Number of batches of each mode from those of the loaders."""

_END = object()


class CombinedLoader(Iterable[tuple[Any, int, int]]):
    """Draws batches from several loaders; iterating gives (batch, batch_idx, dataloader_idx).

    Args:
        iterables: a dict, list or other nest of loaders; batches come in the same nest.
        mode: ``"min_size"`` ends with the loader that ends first; ``"max_size"`` with the last, the others
            giving None; ``"max_size_cycle"`` with the last too, the others beginning anew; ``"sequential"``
            takes one loader after the other: ``batch`` is a loader's own and ``dataloader_idx`` its number.

    Raises:
        ValueError: the mode is none of these.

    Example:
        >>> loader = CombinedLoader({"a": [1, 2, 3], "b": ["x", "y"]}, "max_size_cycle")
        >>> [batch for batch, _, _ in loader][-1]
        {'a': 3, 'b': 'x'}
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in LENGTHS:
            raise ValueError(f"CombinedLoader(mode={mode!r}): choose one of {', '.join(LENGTHS)}.")
        self._iterables = iterables
        self._mode = mode
        self._flattened, self._spec = flatten(iterables)
        self._limits: list[int | float] | None = None
        self._iterator: Iterator[tuple[Any, int, int]] | None = None

    @property
    def iterables(self) -> Any:
        """The loaders in their nest."""
        return self._iterables

    @property
    def mode(self) -> Mode:
        """The mode."""
        return self._mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders in a list; may be set to a list of the same length."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(f"CombinedLoader.flattened has {len(self._flattened)} loaders, not {len(loaders)}.")
        self._iterables = tree_unflatten(loaders, self._spec)
        self._flattened = loaders

    @property
    def sampler(self) -> Any:
        """The loaders' samplers in the same nest; None where a loader has none."""
        return tree_unflatten([getattr(loader, "sampler", None) for loader in self._flattened], self._spec)

    @property
    def batch_sampler(self) -> Any:
        """The loaders' batch samplers in the same nest; None where a loader has none."""
        found = [getattr(loader, "batch_sampler", None) for loader in self._flattened]
        return tree_unflatten(found, self._spec)

    @property
    def limits(self) -> list[int | float] | None:
        """At most so many batches of each loader; a number stands for the same of all."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, int | float):
            limits = [limits] * len(self._flattened)
        elif limits is not None and len(limits) != len(self._flattened):
            raise ValueError(f"CombinedLoader.limits has {len(limits)} numbers for {len(self._flattened)} loaders.")
        self._limits = limits

    def __iter__(self) -> CombinedLoader:
        self._iterator = self._walk()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise RuntimeError("Call iter() on the CombinedLoader before next().")
        return next(self._iterator)

    def __len__(self) -> int:
        lengths = [math.inf if (n := length_of(loader)) is None else n for loader in self._flattened]
        length = LENGTHS[self._mode](map(min, lengths, self._limits or itertools.repeat(math.inf)))
        if math.isinf(length):
            raise TypeError(f"This CombinedLoader (mode={self._mode!r}) has a loader without a length.")
        return int(length)

    def reset(self) -> None:
        """Forget the pass that is under way and end persistent workers."""
        self._iterator = None
        for loader in self._flattened:
            end_workers(loader)

    def _walk(self) -> Iterator[tuple[Any, int, int]]:
        openers = [self._opener(number) for number in range(len(self._flattened))]
        if self._mode == "sequential":
            for number, opener in enumerate(openers):
                for batch_idx, batch in enumerate(opener(0)):
                    yield batch, batch_idx, number
            return
        for batch_idx, row in enumerate(rows(openers, self._mode)):
            yield tree_unflatten(row, self._spec), batch_idx, 0

    def _opener(self, number: int) -> Callable[[int], Iterator[Any]]:
        loader = self._flattened[number]
        limit = math.inf if self._limits is None else self._limits[number]
        if math.isinf(limit):
            return lambda turn: iter(loader)
        return lambda turn: itertools.islice(loader, int(limit))


def rows(
    openers: Sequence[Callable[[int], Iterator[Any]]], mode: str, begun: Sequence[int] | None = None
) -> Iterator[list[Any]]:
    """Draws side by side from several iterators, in one of the modes but ``"sequential"``.

    Args:
        openers: each opens one iterator, given the number of passes that have ended before.
        mode: when to end, and what an iterator gives that has ended before.
        begun: passes of each that have ended already; default none.
    """
    turns = list(begun or [0] * len(openers))
    iterators = [opener(turn) for opener, turn in zip(openers, turns, strict=True)]
    while iterators:
        row = [next(iterator, _END) for iterator in iterators]
        ended = [item is _END for item in row]
        turns = [count + is_over for count, is_over in zip(turns, ended, strict=True)]
        if {"min_size": any(ended), "max_size": all(ended), "max_size_cycle": all(turns)}[mode]:
            return
        for number in itertools.compress(range(len(row)), ended):
            row[number] = None
            if mode == "max_size_cycle":
                iterators[number] = openers[number](turns[number])
                row[number] = next(iterators[number], _END)
                if row[number] is _END:
                    return  # an empty loader: there is nothing to cycle through
        yield row


def flatten(loaders: Any) -> tuple[list[Any], TreeSpec]:
    """The loaders of a nest in a list, and what it takes to build the nest again.

    A list of tensors, or of anything that cannot be iterated, is a loader (its items are batches), not a
    nest; so is one of arrays, or of tuples or dicts that have nothing but tensors, arrays, strings and numbers.
    """
    return tree_flatten(loaders, is_leaf=_is_list_of_batches)


def _is_list_of_batches(loaders: Any) -> bool:
    if not isinstance(loaders, list | tuple):
        return False
    return any(not hasattr(item, "__iter__") or (not isinstance(item, list) and _is_batch(item)) for item in loaders)


def _is_batch(item: Any) -> bool:
    """Whether there is nothing in it that could be a loader."""
    if isinstance(item, Mapping | list | tuple):
        parts = list(item.values() if isinstance(item, Mapping) else item)
        return bool(parts) and all(map(_is_batch, parts))
    return isinstance(item, Tensor | str | bytes | int | float | None) or hasattr(item, "__array__")


def end_workers(loader: Any) -> None:
    """Ends the persistent workers of a loader, if it has any."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None
