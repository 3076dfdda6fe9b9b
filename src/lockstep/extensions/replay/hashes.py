"""Hash of named tensors: 64 bits, the same for a sharded and an unsharded tensor with the same values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import box_of, local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as which elements are read, by the elements' size in bytes."""
_WORD = 8
"""Bytes of an int64."""
_COLUMNS = 2**40
"""Number of the first factor of columns, other than those of rows: else a matrix had the hash of its transpose."""
_CHUNK = 2**24
"""Words whose products are stored at a time on a device other than the CPU."""


class _Part(NamedTuple):
    """How this rank's part of a tensor is read."""

    name: str
    in_words: bool
    """True if several elements are read as one int64, False if each is converted to one."""
    columns: Tensor | None
    """Factors of the columns; None for a single column, whose factor is 1."""


class TensorHash:
    r"""Hash of tensors by their bits.

    The bits of a tensor are read as integers :math:`x_{rc}` of 64 bits, rows :math:`r` along its first dimension, and
    columns :math:`c` along the others. Its hash is the sum of :math:`b_r a_c x_{rc}` modulo :math:`2^{64}`, with odd
    pseudo-random factors. A sum has no order, so the hash of a tensor is the sum of the hashes of its shards.

    Each change of one integer changes the hash. Changes of several cancel out with a probability of :math:`2^{k-64}`,
    where :math:`k` is their lowest bit: this is large only if all changes are in signs and exponents, with float32 in
    every second column. Elements of 64 bits are mixed first, so that a changed sign of each is seen.

    Args:
        rank: this rank. Tensors that all ranks have count on rank 0.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: dict[tuple[str, ...], tuple[list[_Part], Tensor]] = {}

    @torch.no_grad()
    def __call__(self, named: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return this rank's part of the hash, int64 () on ``device``. The sum over all ranks is the hash.

        A name must always have the same shape, type and placement.

        Args:
            named: tensors, or sharded tensors, by name.
            device: device of the tensors.

        Raises:
            MisconfigurationException: a tensor is sharded in a dimension other than its first two, or between two
                elements that are read as one integer.
        """
        names = tuple(named)
        if names not in self._parts:
            found = [self._part(name, tensor, device) for name, tensor in named.items() if self._counts(tensor)]
            rows = torch.cat([factors for _, factors in found]) if found else torch.empty(0)
            self._parts[names] = [part for part, _ in found], rows
        parts, rows = self._parts[names]
        if not parts:
            return torch.zeros((), dtype=torch.int64, device=device)
        return _dot(torch.cat([_products(local_part(named[part.name]), part) for part in parts]), rows)

    def _part(self, name: str, tensor: Tensor, device: torch.device) -> tuple[_Part, Tensor]:
        """Return this rank's part of a tensor, and the factors of its rows."""
        local, box = local_part(tensor.detach()), box_of(tensor)
        # in the real numbers of a row: of the full tensor, before this part of the row, and in it
        in_element = 2 if local.is_complex() else 1
        length = math.prod(tensor.shape[1:]) * in_element
        before = (box[1].start if len(box) > 1 else 0) * math.prod(tensor.shape[2:]) * in_element
        count = len(local) if local.ndim else 1
        columns = local.numel() * in_element // count
        size = local.element_size() // in_element
        in_word = _WORD // size if length * size % _WORD == 0 else 1
        is_whole = all(part.stop - part.start == full for part, full in zip(box[2:], tensor.shape[2:], strict=True))
        if not is_whole or before % in_word or columns % in_word:
            raise MisconfigurationException(
                f'Trainer(record="hashes"): {name}, of shape {tuple(tensor.shape)}, is sharded in a dimension other '
                f"than its first two, or not in multiples of {in_word} numbers: remove `record`, or shard another "
                "dimension."
            )
        salt, first = zlib.crc32(name.encode()) | 1, box[0].start if box else 0
        factors = None
        if length > in_word:
            factors = _random(_COLUMNS + before // in_word, columns // in_word, device)
        return _Part(name, in_word > 1, factors), _random(first, count, device) * salt

    def _counts(self, tensor: Tensor) -> bool:
        """Return True if this rank has values of a tensor, and no other rank of a lower number has them."""
        if not local_part(tensor).numel():
            return False
        placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
        if placements is None or mesh is None:
            return self._rank == 0
        place = mesh.get_coordinate()
        return place is not None and all(
            at == 0 for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
        )


def _random(first: int, count: int, device: torch.device) -> Tensor:
    """Return the odd pseudo-random factors from number ``first`` on, int64 (count,)."""
    # splitmix64 (Steele, Lea and Flood, 2014) of the number, with its constants as signed integers
    number = torch.arange(first + 1, first + count + 1) * -0x61C8864680B583EB
    number = (number ^ _shifted(number, 30)) * -0x40A7B892E31B1A47
    number = (number ^ _shifted(number, 27)) * -0x6B2FB644ECCEEE15
    return (number ^ _shifted(number, 31) | 1).to(device)


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, filling with zeros."""
    return (number >> bits) & (2 ** (64 - bits) - 1)


def _products(tensor: Tensor, part: _Part) -> Tensor:
    """Return the products of the rows of a tensor with the factors of its columns, int64 (rows,)."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = tensor.reshape(-1).contiguous()
    # gradients of shards are views, which may start within a word
    if part.in_words and values.storage_offset() * values.element_size() % _WORD:
        values = values.clone()
    words = values.view(torch.int64 if part.in_words else _INTEGERS[values.element_size()]).long()
    if values.element_size() == _WORD:
        words = words ^ _shifted(words, 32)
    return words if part.columns is None else _dot(words.view(-1, len(part.columns)), part.columns)


def _dot(values: Tensor, factors: Tensor) -> Tensor:
    """Return the products of the rows of a matrix, or of a vector, with a vector; int64, modulo 2^64."""
    # matrix products of integers are fast on a CPU, and missing elsewhere
    if values.device.type == "cpu":
        return values @ factors
    if values.ndim == 1:
        return (values * factors).sum()
    return torch.cat([(part * factors).sum(1) for part in values.split(max(1, _CHUNK // len(factors)))])
