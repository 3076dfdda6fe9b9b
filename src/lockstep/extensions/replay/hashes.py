"""Hash of named tensors: 64 bits, the same for a sharded and an unsharded tensor with the same values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import box_of, local_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integers as which elements are read, by the elements' size. They have fewer than 64 bits: the highest bit of a 64-bit
number changes a product by 2^63 for any factor, so that changes of two signs would cancel out."""
_COLUMNS = 2**40
"""Number of the first factor of columns, other than those of rows: else a matrix had the hash of its transpose."""
_CHUNK = 2**22
"""Elements that are converted to 64 bits at a time, which limits the memory of a hash to 32 MiB."""


class TensorHash:
    r"""Hash of tensors by their bits.

    The hash of a tensor with elements :math:`x_{rc}`, its bits read as signed integers, is
    :math:`\sum_r b_r \sum_c a_c x_{rc}` modulo :math:`2^{64}`, with odd pseudo-random factors; columns are all
    dimensions but the first. Sums have no order, so the hash of a tensor is the sum of the hashes of its shards.

    Args:
        rank: this rank. Tensors that all ranks have count on rank 0.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factors: dict[tuple[int, int, int, torch.device], Tensor] = {}
        self._layouts: dict[tuple[str, torch.Size, torch.dtype], tuple[Tensor, Tensor] | None] = {}
        self._joined: dict[tuple[str, ...], Tensor] = {}

    def __call__(self, named: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Return this rank's part of the hash, as int64 on ``device``. The sum over all ranks is the hash.

        A name must always have the same placement.

        Args:
            named: tensors, or sharded tensors, by name.
            device: device of the tensors.

        Raises:
            MisconfigurationException: a tensor is sharded in a dimension other than its first two.
        """
        total = torch.zeros((), dtype=torch.int64, device=device)
        vectors: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, tensor in named.items():
            key = (name, tensor.shape, tensor.dtype)
            if key not in self._layouts:
                self._layouts[key] = self._layout(name, tensor, device)
            layout = self._layouts[key]
            if layout is None:
                continue
            (rows, columns), bits = layout, _bits(local_part(tensor.detach()))
            if not len(columns):  # many and small: hashed together
                vectors.setdefault(bits.dtype, {})[name] = bits
                continue
            matrix = bits.view(len(rows), len(columns))
            step = max(1, _CHUNK // len(columns))
            for first in range(0, len(rows), step):
                part = matrix[first : first + step].to(torch.int64)
                total = total + _dot(_dot(part, columns), rows[first : first + step])
        for parts in vectors.values():
            names = (*parts, *(str(len(part)) for part in parts.values()))
            if names not in self._joined:
                layouts = [self._layouts[name, named[name].shape, named[name].dtype] for name in parts]
                self._joined[names] = torch.cat([layout[0] for layout in layouts if layout is not None])
            total = total + _dot(torch.cat([*parts.values()]).to(torch.int64), self._joined[names])
        return total

    def _layout(self, name: str, tensor: Tensor, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return factors of (rows, columns) of this rank's part of a tensor; None if nothing of it counts.

        A vector has factors of rows only.
        """
        local, box = local_part(tensor.detach()), box_of(tensor)
        if not local.numel() or not self._counts(tensor):
            return None
        salt, count = zlib.crc32(name.encode()) | 1, _bits(local).numel()
        width = count // local.numel()  # integers per element
        if local.ndim < 2:
            first = box[0].start * width if box else 0
            return self._factor(first, count, salt, device), torch.zeros(0)
        if any(part.stop - part.start != size for part, size in zip(box[2:], tensor.shape[2:], strict=True)):
            raise MisconfigurationException(
                f'Trainer(record="hashes"): {name} is sharded in a dimension other than its first two: remove '
                "`record`, or shard another dimension."
            )
        first = _COLUMNS + box[1].start * math.prod(tensor.shape[2:]) * width
        columns = self._factor(first, count // len(local), 1, device)
        return self._factor(box[0].start, len(local), salt, device), columns

    def _counts(self, tensor: Tensor) -> bool:
        """Return True if this rank's values of a tensor count, because no other rank of a lower number has them."""
        placements, mesh = getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)
        if placements is None or mesh is None:
            return self._rank == 0
        place = mesh.get_coordinate()
        return place is not None and all(
            at == 0 for at, placement in zip(place, placements, strict=True) if placement.is_replicate()
        )

    def _factor(self, first: int, count: int, salt: int, device: torch.device) -> Tensor:
        """Return ``count`` odd factors from number ``first`` on, multiplied by ``salt``."""
        key = (first, count, salt, device)
        if key not in self._factors:
            # splitmix64 (Steele, Lea and Flood, 2014) of the number
            number = torch.arange(first + 1, first + count + 1) * _signed(0x9E3779B97F4A7C15)
            number = (number ^ _shifted(number, 30)) * _signed(0xBF58476D1CE4E5B9)
            number = (number ^ _shifted(number, 27)) * _signed(0x94D049BB133111EB)
            self._factors[key] = (((number ^ _shifted(number, 31)) | 1) * salt).to(device)
        return self._factors[key]


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(number: Tensor, bits: int) -> Tensor:
    """Shift int64 numbers to the right, filling with zeros."""
    return (number >> bits) & (2 ** (64 - bits) - 1)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a vector of signed integers."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()])


def _dot(values: Tensor, factors: Tensor) -> Tensor:
    # a CPU sums products faster in a matrix product, which other devices do not have for integers
    return values @ factors if values.device.type == "cpu" else (values * factors).sum(-1)
