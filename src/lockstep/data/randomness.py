"""Random numbers in ``__getitem__`` and ``collate_fn``: seeded by position, apart from those of training."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from lockstep.data.drawn_order import generator_state, seed_generator, set_generator_state
from lockstep.data.order import mix


def seed_all(bits: int) -> None:
    """Seeds torch, numpy (where it is loaded) and ``random`` with 64 bits; about 6 us.

    Torch and numpy run the same Mersenne twister, so each gets a half of its own. `torch.manual_seed` would
    also walk over every accelerator, at ten times the price.
    """
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(bits >> 32)
    random.seed(bits)


def capture() -> tuple[Any, ...]:
    """The random states of the process, for :func:`put_back`."""
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def put_back(states: tuple[Any, ...]) -> None:
    """Undoes whatever has been drawn since :func:`capture`."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


class SeededIndices(list[int]):
    """Indices of a batch that seed the random generators as a fetcher walks over them.

    Before a sample's index is handed out the generators are seeded from the sample's position (``collate_fn`` goes
    on from the last one's). Unpickling, which is how a batch's indices reach a loader's worker, seeds as well: that
    is for data sets that fetch a whole batch by themselves (``__getitems__``).

    Args:
        indices: what the data set is asked for.
        key: 64 bits of (seed, epoch).
        first: position of the first index; the others follow.
    """

    def __init__(self, indices: Sequence[int], key: int, first: int) -> None:
        super().__init__(indices)
        self.key = key
        self.first = first

    def __iter__(self) -> Iterator[int]:
        for position, index in enumerate(super().__iter__(), self.first):
            seed_all(mix(self.key, position))
            yield index

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (list(super().__iter__()), self.key, self.first)

    def seed(self) -> None:
        """Seeds for a fetch that does not walk over the indices one by one."""
        seed_all(mix(self.key, self.first))


def _arrive(indices: list[int], key: int, first: int) -> SeededIndices:
    arrived = SeededIndices(indices, key, first)
    arrived.seed()
    return arrived


class SeededIndex(int):
    """An index for a loader with ``batch_size=None``; seeds where it is unpickled, in the loader's worker."""

    key: int
    first: int

    @classmethod
    def make(cls, index: int, key: int, first: int) -> SeededIndex:
        """An index at position ``first`` of the epoch that ``key`` stands for."""
        made = cls(index)
        made.key = key
        made.first = first
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive_alone, (int(self), self.key, self.first)

    def seed(self) -> None:
        """Seeds for the fetch of this sample."""
        seed_all(mix(self.key, self.first))


def _arrive_alone(index: int, key: int, first: int) -> int:
    seed_all(mix(key, first))
    return index


class Lane:
    """Random states of something that draws now and then, apart from those of everybody else.

    Inside the context the process' generators (and the ``generators`` given) go on from where the lane left
    them; outside they are as if nothing had been drawn.

    Args:
        bits: where the lane starts.
        generators: further generators that are drawn from, and the bits that each of them starts at.
    """

    def __init__(self, bits: int, generators: Sequence[tuple[Any, int]] = ()) -> None:
        self._bits = bits
        self._generators = generators
        self._inside: tuple[Any, ...] | None = None
        self._inside_of: list[Any] = []
        self._outside: tuple[Any, ...] = ()
        self._outside_of: list[Any] = []

    def __enter__(self) -> Lane:
        self._outside = capture()
        self._outside_of = [generator_state(made) for made, _ in self._generators]
        if self._inside is None:
            seed_all(self._bits)
            for made, bits in self._generators:
                seed_generator(made, bits)
        else:
            put_back(self._inside)
            for (made, _), state in zip(self._generators, self._inside_of, strict=True):
                set_generator_state(made, state)
        return self

    def __exit__(self, *error: object) -> None:
        self._inside = capture()
        self._inside_of = [generator_state(made) for made, _ in self._generators]
        put_back(self._outside)
        for (made, _), state in zip(self._generators, self._outside_of, strict=True):
            set_generator_state(made, state)


def draws_nothing(dataset: object, collate: object) -> bool:
    """Whether fetching is known to draw no random numbers: tensors and lists, subsets and sums of such."""
    if collate is not default_collate:
        return False
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part, collate) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)
