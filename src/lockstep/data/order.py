"""Orders of samples: functions from (seed, epoch, position) to an index, in constant time and memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

Order = Callable[[Tensor], Tensor]
"""Function that maps positions in an epoch (int64, any shape) to data set indices (same shape)."""

SMALL = 1 << 16
"""Largest number of samples for which a permutation is a table (Fisher and Yates); larger ones are computed."""

_ROUNDS = 8
_MASK62 = (1 << 62) - 1
_MASK64 = (1 << 64) - 1
# Odd multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers for torch.
_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_M2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15


def make_key(*parts: int | str) -> int:
    """Hash the arguments to a 64-bit key, which is the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix(key: int, position: int) -> int:
    """Return 64 pseudo-random bits for a key and a position, by splitmix64 in Python's integers (under 1 us)."""
    x = (key + (position + 1) * _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def generator(key: int) -> torch.Generator:
    """Return a new random generator on the CPU, with the key as its seed."""
    made = torch.Generator()
    made.manual_seed(key)
    return made


def sequential(positions: Tensor) -> Tensor:
    """Return the positions themselves as indices. This is the order of a loader that does not shuffle."""
    return positions


class Shuffled:
    """Endless sequence of permutations of ``range(n)``, determined by a key. Each ``n`` positions are one permutation.

    Args:
        n: number of samples, at least 1.
        key: 64 bits, from :func:`make_key`; each key has a different permutation.

    Example:
        >>> order = Shuffled(10**9, make_key(42, 0))
        >>> order(torch.arange(4)).shape
        torch.Size([4])
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self.key = key
        self._pass = -1
        self._permutation: Order = sequential

    def __call__(self, positions: Tensor) -> Tensor:
        flat = positions.reshape(-1)
        if flat.numel() == 0:
            return positions
        first, last = int(flat.min()) // self.n, int(flat.max()) // self.n
        if first == last:
            return self._on_pass(first)(positions - first * self.n if first else positions)
        out = torch.empty_like(flat)
        for number in range(first, last + 1):
            here = (flat >= number * self.n) & (flat < (number + 1) * self.n)
            out[here] = self._on_pass(number)(flat[here] - number * self.n)
        return out.reshape(positions.shape)

    def _on_pass(self, number: int) -> Order:
        if number != self._pass:
            key = self.key if number == 0 else make_key(self.key, "pass", number)
            # A table is faster, but takes memory in proportion to n.
            self._permutation = table(self.n, key) if self.n <= SMALL else Feistel(self.n, key)
            self._pass = number
        return self._permutation


def table(n: int, key: int) -> Order:
    """Return a permutation of ``range(n)`` that is stored as a table. Use it for moderate ``n``."""
    indices = torch.randperm(n, generator=generator(key))
    return lambda positions: indices[positions]


class Feistel:
    """A permutation of ``range(n)`` that is computed from a key without a table, for any ``n`` below 2**62.

    A Feistel network over pairs (left, right) of ``a x b >= n`` values, ``a`` and ``b`` near the root of
    ``n``, that adds modulo ``a`` and ``b`` in turn; a value that leaves ``range(n)`` is sent through again
    until it is back (cycle walking; at most about one in ``sqrt(n)`` values does). Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. Vectorised: about 0.1 us a sample.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self.a = math.isqrt(n - 1) + 1
        self.b = -(-n // self.a)
        self.keys = [mix(key, number) & _MASK62 for number in range(_ROUNDS)]

    def __call__(self, positions: Tensor) -> Tensor:
        out = self._network(positions)
        outside = (out >= self.n).nonzero(as_tuple=True)
        while outside[0].numel():
            again = self._network(out[outside])
            out[outside] = again
            outside = tuple(axis[again >= self.n] for axis in outside)
        return out

    def _network(self, values: Tensor) -> Tensor:
        left = torch.div(values, self.b, rounding_mode="trunc")
        right = values - left * self.b
        for number, key in enumerate(self.keys):
            if number % 2 == 0:
                left = scramble(right, key).add_(left).remainder_(self.a)
            else:
                right = scramble(left, key).add_(right).remainder_(self.b)
        return left.mul_(self.b).add_(right)


def scramble(values: Tensor, key: int) -> Tensor:
    """Hash each int64 value with ``key`` to 61 pseudo-random bits, by the last steps of splitmix64. Not in place."""
    x = (values + key).mul_(_M1)
    # `>>` of int64 copies the sign bit; the masks make it a logical shift.
    x.bitwise_xor_((x >> 29).bitwise_and_((1 << 35) - 1))
    x.mul_(_M2)
    x.bitwise_xor_((x >> 32).bitwise_and_((1 << 32) - 1))
    return x.bitwise_and_((1 << 61) - 1)


class WithReplacement:
    """An order in which every position draws an index from ``range(n)`` independently and uniformly."""

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self.key = key & _MASK62

    def __call__(self, positions: Tensor) -> Tensor:
        return scramble(scramble(positions, self.key), self.key ^ 1).remainder_(self.n)
