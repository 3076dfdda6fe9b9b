"""Random numbers for ``__getitem__`` and ``collate_fn``, seeded from the sample's position in the epoch.

They are independent of the random numbers of training.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from lockstep.data.order import mix

# -- the process' generators ---------------------------------------------------------------------------------


def seed_all(bits: int) -> None:
    """Seed torch's CPU generator, Python's ``random``, and numpy if it is loaded, from 64 bits. Takes about 6 us.

    torch and numpy use the same Mersenne twister, so each is seeded with a different half of the bits.
    `torch.manual_seed` would also visit every accelerator, which takes ten times as long.
    """
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(bits >> 32)
    random.seed(bits)


def capture() -> tuple[Any, ...]:
    """Return the states of this process's random generators, for :func:`put_back`."""
    numpy = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def put_back(states: tuple[Any, ...]) -> None:
    """Restore the states of the random generators that :func:`capture` returned."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


# -- indices that seed ---------------------------------------------------------------------------------------


class SeededIndices(list[int]):
    """Indices of a batch. Iterating over them seeds the random generators for each sample before it is fetched.

    Before an index is yielded, the generators are seeded from the sample's position; ``collate_fn`` continues from the
    last sample's state. The generators are also seeded when the indices are unpickled in a loader's worker, for data
    sets that fetch a whole batch at once (``__getitems__``).

    Args:
        indices: indices into the data set.
        key: 64-bit hash of (seed, epoch).
        first: position of the first index in the epoch; the others follow.
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
        """Seed the generators for a data set of this process that fetches a whole batch at once."""
        seed_all(mix(self.key, self.first))


def _arrive(indices: list[int], key: int, first: int) -> SeededIndices:
    arrived = SeededIndices(indices, key, first)
    arrived.seed()
    return arrived


class SeededIndex(int):
    """Index for a loader with ``batch_size=None``. Unpickling it in a worker seeds the worker's random generators."""

    key: int
    first: int

    @classmethod
    def make(cls, index: int, key: int, first: int) -> SeededIndex:
        """Create an index. ``first`` is its position in the epoch, and ``key`` a hash of (seed, epoch)."""
        made = cls(index)
        made.key = key
        made.first = first
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive_alone, (int(self), self.key, self.first)

    def seed(self) -> None:
        """Seed the generators for this sample, before this process fetches it."""
        seed_all(mix(self.key, self.first))


def _arrive_alone(index: int, key: int, first: int) -> int:
    seed_all(mix(key, first))
    return index


# -- a user's generators -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldGenerator:
    """Common interface to the random generators in samplers: torch's on the CPU, NumPy's or Python's."""

    state: Callable[[], Any]
    """Returns the generator's state in a form that a checkpoint can store."""
    set_state: Callable[[Any], object]
    """Restores a state."""
    seed: Callable[[int], object]
    """Seeds the generator with 63 bits."""
    initial_seed: Callable[[], int] | None = None

    def initial_bits(self) -> int:
        """Return the generator's initial seed, or a 63-bit hash of its state if the seed is unknown."""
        if self.initial_seed is not None:
            return self.initial_seed()
        digest = hashlib.blake2b(repr(self.state()).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def held_generator(value: object) -> HeldGenerator | None:
    """Wrap a random generator in the common interface. Return None if ``value`` is not a known generator."""
    if isinstance(value, torch.Generator):
        known = HeldGenerator(value.get_state, value.set_state, value.manual_seed, value.initial_seed)
        return known if value.device.type == "cpu" else None
    if isinstance(value, random.Random):
        # SystemRandom reads the system's entropy: it has no seed and no state.
        known = HeldGenerator(value.getstate, value.setstate, value.seed)
        return None if isinstance(value, random.SystemRandom) else known
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        state: Any = value
        return HeldGenerator(
            lambda: _without_arrays(state.get_state()), state.set_state, lambda bits: state.seed(bits & 0xFFFFFFFF)
        )
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bit_generator: Any = value.bit_generator
        put = partial(setattr, bit_generator, "state")
        return HeldGenerator(
            lambda: _without_arrays(bit_generator.state), put, lambda bits: put(type(bit_generator)(bits).state)
        )
    return None


def generators_of(holders: Iterable[object]) -> list[HeldGenerator]:
    """Return a wrapper of each random generator that is an attribute of one of the samplers."""
    values = {id(value): value for holder in holders for value in getattr(holder, "__dict__", {}).values()}
    return [known for value in values.values() if (known := held_generator(value)) is not None]


def _without_arrays(state: object) -> Any:
    """Convert NumPy arrays in a generator's state to lists, so that a checkpoint can contain the state."""
    # torch.load(weights_only=True) does not read NumPy's arrays.
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_without_arrays, state))
    return state.tolist() if hasattr(state, "tolist") else state


class SeparateStates:
    """Context manager in which random generators have states separate from those of the rest of the process.

    Inside the context, the process' generators (and the given ``generators``) continue from the state at the end of the
    previous context. Outside, they behave as if nothing had been drawn inside.

    Args:
        bits: the seed for the first context.
        generators: further generators that are drawn from, each with the bits that seed it.
    """

    def __init__(self, bits: int, generators: Sequence[tuple[HeldGenerator, int]] = ()) -> None:
        self._bits = bits
        self._generators = generators
        self._inside: tuple[tuple[Any, ...], list[Any]] | None = None
        self._outside: tuple[tuple[Any, ...], list[Any]] = ((), [])

    def __enter__(self) -> SeparateStates:
        self._outside = self._capture()
        if self._inside is not None:
            self._put_back(self._inside)
            return self
        seed_all(self._bits)
        for held, bits in self._generators:
            held.seed(bits)
        return self

    def __exit__(self, *error: object) -> None:
        self._inside = self._capture()
        self._put_back(self._outside)

    def _capture(self) -> tuple[tuple[Any, ...], list[Any]]:
        return capture(), [held.state() for held, _ in self._generators]

    def _put_back(self, states: tuple[tuple[Any, ...], list[Any]]) -> None:
        put_back(states[0])
        for (held, _), state in zip(self._generators, states[1], strict=True):
            held.set_state(state)


def draws_nothing(dataset: object, collate: object) -> bool:
    """Return True if fetching samples certainly draws no random numbers, so that seeding is not needed.

    This is certain for tensors and lists, and for subsets and concatenations of them, with torch's default collation.
    """
    if collate is not default_collate:
        return False
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset, collate)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part, collate) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list, tuple, range, torch.Tensor)
