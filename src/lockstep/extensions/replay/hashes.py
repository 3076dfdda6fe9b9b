"""Hash of named tensors: 64 bits, the same for a sharded and an unsharded tensor with the same values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import box_of, local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integers as which elements are read, by the elements' size."""
_COLUMNS = 2**40
"""Number of the first factor of columns, other than those of rows: else a matrix had the hash of its transpose."""
_CHUNK = 2**18
"""Elements that are hashed at a time, which keeps their copies in a cache."""


class _Piece(NamedTuple):
    """Rows of this rank's part of a tensor, or a whole vector."""

    name: str
    first: int
    """Number of its first integer in the part."""
    last: int
    """Number of the integer after its last one."""
    rows: Tensor | None
    """Factors (2, number of rows); None for a vector."""
    columns: Tensor
    """Factors (2, number of columns)."""


class _PieceGroup:
    """Pieces that are copied into one buffer, so that they are read by few operations.

    Args:
        pieces: the pieces.
        buffers: memory for all integers of the pieces, and for their higher halves, (2, n).

    Attributes:
        views: for both buffers, (factors of rows, view of the buffer) for each piece.
        columns: factors of the columns of all pieces, (2, m).
    """

    def __init__(self, pieces: Sequence[_Piece], buffers: Tensor) -> None:
        self.pieces = pieces
        self.buffers = buffers
        self.columns = torch.cat([piece.columns for piece in pieces], 1)
        self.views: tuple[list[tuple[Tensor | None, Tensor]], ...] = ([], [])
        for number, views in enumerate(self.views):
            for piece, part in zip(pieces, buffers[number].split([_size(piece) for piece in pieces]), strict=True):
                if piece.rows is None:
                    views.append((None, part))
                else:
                    views.append((piece.rows[number], part.view(piece.rows.shape[1], -1)))


class TensorHash:
    r"""Hash of tensors by their bits.

    The bits of a tensor are read as 32-bit integers :math:`x_{rc}`; columns are all dimensions but the first. Its hash
    is two sums modulo :math:`2^{32}`, of :math:`b_r a_c x_{rc}` and of :math:`b'_r a'_c \lfloor x_{rc} / 2^{16}
    \rfloor`, with odd pseudo-random factors. The second sum is there for signs: the highest bit of :math:`x_{rc}`
    changes the first sum by :math:`2^{31}`, whatever the factors, so that two changed signs would cancel out. Sums have
    no order, so the hash of a tensor is the sum of the hashes of its shards.

    Args:
        rank: this rank. Tensors that all ranks have count on rank 0.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[tuple[tuple[str, torch.Size, torch.dtype], ...], list[_PieceGroup]] = {}

    @torch.no_grad()
    def __call__(self, named: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return this rank's part of the two sums, for :func:`pack`, as int64 (2,) on ``device``.

        A name must always have the same placement.

        Args:
            named: tensors, or sharded tensors, by name.
            device: device of the tensors.

        Raises:
            MisconfigurationException: a tensor is sharded in a dimension other than its first two.
        """
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in named.items())
        if key not in self._groups:
            self._groups[key] = self._grouped(named, device)
        sums = [torch.zeros((), dtype=torch.int32, device=device)] * 2
        for group in self._groups[key]:
            parts = [_bits(local_part(named[piece.name]))[piece.first : piece.last] for piece in group.pieces]
            torch.cat(parts, out=group.buffers[0])
            torch.bitwise_right_shift(group.buffers[0], 16, out=group.buffers[1])
            for views, factors in zip(group.views, group.columns, strict=True):
                columns = [view if rows is None else _dot(rows, view) for rows, view in views]
                sums.append(_dot(torch.cat(columns), factors))
        return torch.stack(sums).view(-1, 2).sum(0)

    def _grouped(self, named: Mapping[str, Tensor], device: torch.device) -> list[_PieceGroup]:
        """Divide this rank's parts of tensors into groups of about `_CHUNK` integers, which share their buffers."""
        found: list[list[_Piece]] = [[]]
        for piece in (piece for name, tensor in named.items() for piece in self._pieces(name, tensor, device)):
            if found[-1] and sum(map(_size, found[-1])) + _size(piece) > _CHUNK:
                found.append([])
            found[-1].append(piece)
        sizes = [sum(map(_size, pieces)) for pieces in found]
        buffers = torch.zeros(2, max(sizes), dtype=torch.int32, device=device)
        return [_PieceGroup(pieces, buffers[:, :size]) for pieces, size in zip(found, sizes, strict=True) if pieces]

    def _pieces(self, name: str, tensor: Tensor, device: torch.device) -> Iterator[_Piece]:
        """Yield this rank's part of a tensor in pieces; nothing if another rank's part counts."""
        local, box = local_part(tensor.detach()), box_of(tensor)
        if not local.numel() or not self._counts(tensor):
            return
        salt, count = zlib.crc32(name.encode()) | 1, _bits(local).numel()
        width = count // local.numel()  # integers per element
        if local.ndim < 2:
            first = box[0].start * width if box else 0
            yield _Piece(name, 0, count, None, _factors(first, count, salt, device))
            return
        if any(part.stop - part.start != size for part, size in zip(box[2:], tensor.shape[2:], strict=True)):
            raise MisconfigurationException(
                f'Trainer(record="hashes"): {name} is sharded in a dimension other than its first two: remove '
                "`record`, or shard another dimension."
            )
        first, length = _COLUMNS + box[1].start * math.prod(tensor.shape[2:]) * width, count // len(local)
        rows = _factors(box[0].start, len(local), salt, device)
        columns = _factors(first, length, 1, device)
        step = max(1, _CHUNK // length)
        for row in range(0, len(local), step):
            last = min(row + step, len(local))
            yield _Piece(name, row * length, last * length, rows[:, row:last], columns)

    def _counts(self, tensor: Tensor) -> bool:
        """Return True if this rank's values of a tensor count, because no other rank of a lower number has them."""
        placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
        if placements is None or mesh is None:
            return self._rank == 0
        place = mesh.get_coordinate()
        return place is not None and all(
            at == 0 for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
        )


def _size(piece: _Piece) -> int:
    return piece.last - piece.first


def _factors(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """Return two times ``count`` odd factors, int32 (2, count), from number ``first`` on, times ``salt``."""
    # splitmix64 (Steele, Lea and Flood, 2014) of the number
    number = torch.arange(first + 1, first + count + 1) * _signed(0x9E3779B97F4A7C15)
    number = (number ^ _shifted(number, 30)) * _signed(0xBF58476D1CE4E5B9)
    number = (number ^ _shifted(number, 27)) * _signed(0x94D049BB133111EB)
    number = number ^ _shifted(number, 31)
    return ((torch.stack((number, number >> 32)) | 1) * salt).to(torch.int32).to(device)


def pack(sums: Tensor) -> Tensor:
    """Return hashes of 64 bits, int64 (...), from sums of the parts of all ranks, int64 (..., 2)."""
    return (sums[..., 0] << 32) | (sums[..., 1] & 0xFFFFFFFF)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, filling with zeros."""
    return (number >> bits) & (2 ** (64 - bits) - 1)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a vector of int32. Elements of 8 bytes give two integers, smaller ones one."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()]).to(torch.int32)


def _dot(vector: Tensor, values: Tensor) -> Tensor:
    """Return the product of a vector with a matrix or a vector modulo 2^32, as int32."""
    # a CPU sums products faster in a matrix product, which other devices do not have for integers
    if values.device.type == "cpu":
        return vector @ values
    return (values * (vector if values.ndim == 1 else vector[:, None])).sum(0).to(torch.int32)
