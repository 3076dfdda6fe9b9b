"""The order that a user's sampler draws: its generators, which the epoch seeds, and a hash that tells orders apart."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NoReturn

import torch

from lockstep.ground.errors import MisconfigurationException

_WAY_OUT = (
    "Make its order a function of the epoch: draw it from torch's, NumPy's or Python's global generator (they are "
    "seeded alike on all ranks and in every run), or seed its own by `set_epoch(epoch)`; or give it `state_dict` and "
    "`load_state_dict`"
)


# -- generators ------------------------------------------------------------------------------------------------


def generators_of(holder: object) -> list[Any]:
    """The generators that a sampler holds as attributes: of torch on the CPU, of NumPy, and of Python."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    found = [value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, kinds)]
    return [
        value
        for value in found
        if not isinstance(value, random.SystemRandom)
        and not (isinstance(value, torch.Generator) and value.device.type != "cpu")
    ]


def initial_bits(made: Any) -> int:
    """63 bits that stand for how a generator was seeded."""
    if isinstance(made, torch.Generator):
        return made.initial_seed()
    state = repr(generator_state(made)).encode()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1


def seed_generator(made: Any, bits: int) -> None:
    """Seeds any generator of :func:`generators_of`."""
    if isinstance(made, torch.Generator):
        made.manual_seed(bits)
    elif isinstance(made, random.Random):
        made.seed(bits)
    elif hasattr(made, "bit_generator"):
        made.bit_generator.state = type(made.bit_generator)(bits).state
    else:
        made.seed(bits & 0xFFFFFFFF)


def generator_state(made: Any) -> Any:
    """The state of any generator of :func:`generators_of`, as a checkpoint can hold it."""
    if isinstance(made, torch.Generator):
        return made.get_state()
    if isinstance(made, random.Random):
        return made.getstate()
    return _without_arrays(made.bit_generator.state if hasattr(made, "bit_generator") else made.get_state())


def _without_arrays(state: Any) -> Any:
    """NumPy's arrays as lists, which it takes back too."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_without_arrays, state))
    return state.tolist() if hasattr(state, "tolist") else state


def set_generator_state(made: Any, state: Any) -> None:
    """Puts back what :func:`generator_state` gave."""
    if isinstance(made, torch.Generator):
        made.set_state(state)
    elif isinstance(made, random.Random):
        made.setstate(state)
    elif hasattr(made, "bit_generator"):
        made.bit_generator.state = state
    else:
        made.set_state(state)


def stateful(holders: Iterable[object]) -> list[Any]:
    """Those samplers that can save where they are and go back there."""
    return [
        holder
        for holder in holders
        if callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))
    ]


# -- what was drawn --------------------------------------------------------------------------------------------


class DrawnOrder:
    """A running hash of what a sampler has yielded in a pass, compared with the one that a checkpoint holds.

    Args:
        sampler: for messages.
        name: of its loader, for messages.

    Attributes:
        count: what was hashed so far, in elements.
        expected: how many elements the checkpoint's pass had drawn when it was saved; 0 where nothing is left to
            compare.
    """

    def __init__(self, sampler: object, name: str) -> None:
        self.sampler = sampler
        self.name = name
        self.count = 0
        self.expected = 0
        self._wanted = ""
        self._hash: Any = hashlib.blake2b(digest_size=8)

    def begin(self, saved: Sequence[Any] = ()) -> None:
        """Another pass begins: with ``saved``, the one that a checkpoint was taken in."""
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self.expected, self._wanted = saved or (0, "")

    def saved(self) -> list[Any]:
        """For :meth:`begin`, as plain data; empty where the elements have no content that could be compared."""
        return [] if self._hash is None else [self.count, self._hash.hexdigest()]

    def add(self, drawn: Sequence[Any]) -> None:
        """What came next out of the sampler.

        Raises:
            MisconfigurationException: it is not what it was before the resume.
        """
        left = self.expected - self.count
        if 0 < left < len(drawn):
            self.add(drawn[:left])
            drawn = drawn[left:]
        self.count += len(drawn)
        if self._hash is not None:
            found = content(drawn)
            if found is None:
                self._hash = None
            else:
                self._hash.update(found)
        if self.expected and self.count >= self.expected:
            self.expected = 0
            if self._hash is not None and self._hash.hexdigest() != self._wanted:
                self._refuse()

    def ended(self) -> None:
        """The sampler has ended; as :meth:`add`, that is too early if it had drawn more before the resume."""
        if self.expected:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise MisconfigurationException(
            f"{self.name}: the {type(self.sampler).__name__} draws another order than it did before the run was "
            "resumed in the middle of this epoch, so that samples would be seen twice and others never. "
            f"{_WAY_OUT}. The run can go on from a checkpoint of an epoch's end."
        )

    def compare(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Compares what was drawn so far over the ranks. Collective.

        Raises:
            MisconfigurationException: ranks drew different orders.
        """
        mine = 0 if self._hash is None else int.from_bytes(self._hash.digest(), "big") >> 1
        ranks = gather(torch.tensor([mine], dtype=torch.int64)).flatten().tolist()
        if 0 not in ranks and len(set(ranks)) > 1:
            raise MisconfigurationException(
                f"{self.name}: the {type(self.sampler).__name__} draws another order on each rank, so that samples "
                f"would be seen twice and others never. {_WAY_OUT}. If each rank has data of its own, set "
                "Trainer(use_distributed_sampler=False)."
            )


def content(drawn: Sequence[Any]) -> bytes | None:
    """Bytes that are the same for equal elements of a sampler; None where that cannot be told."""
    try:
        return array("q", drawn).tobytes()
    except (TypeError, ValueError, OverflowError):
        pass
    found = []
    for element in drawn:
        try:
            found.append(array("q", element).tobytes())
        except (TypeError, ValueError, OverflowError):
            text = repr(element)
            if " at 0x" in text:  # names an address
                return None
            found.append(text.encode(errors="replace"))
    return b"|".join(found)


class WatchedSampler:
    """A (batch) sampler of a loader that is taken as it stands: what it yields is hashed on the way."""

    def __init__(self, sampler: Any, order: DrawnOrder) -> None:
        self._sampler = sampler
        self.order = order
        self.resume: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        saved, self.resume = self.resume, []
        self.order.begin(saved)
        for element in self._sampler:
            self.order.add([element])
            yield element
        self.order.ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)


def states_of(samplers: Iterable[Any]) -> list[Any]:
    """What samplers that can save where they are give of it."""
    return [deepcopy(sampler.state_dict()) for sampler in samplers]


def of_all_ranks(state: Any) -> dict[str, Any]:
    """What of a loader's state on one rank holds on every rank and for any number of them: the order of positions."""
    if not isinstance(state, dict):
        return {}
    kept: dict[str, Any] = {key: state[key] for key in ("order",) if key in state}
    if "parts" in state:
        parts = [of_all_ranks(part) for part in state["parts"]]
        if any(parts):
            kept["parts"] = parts
    return kept
