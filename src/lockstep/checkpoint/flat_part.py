"""FlatPart: a tensor subclass with this rank's range of the flattened tensor, for torch's DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm


def span(numel: int, rank: int, world: int) -> tuple[int, int]:
    """Return (start, length) of a rank's range if ``numel`` elements are split evenly over ``world`` ranks.

    Example:
        >>> [span(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 2), (4, 1)]
    """
    size = -(-numel // world)
    start = min(rank * size, numel)
    return start, min(size, numel - start)


class FlatPart(Tensor):
    """A tensor with the shape and dtype of the full tensor, but only this rank's range of elements in memory.

    It does not support computation; `whole` gathers an ordinary tensor.

    Args:
        shape: shape of the full tensor.
        start: index of this rank's first element in the flattened tensor.
        values: this rank's elements, one-dimensional; may be empty.
        even: the elements are those of `span` on all ranks.

    Example:
        >>> part = FlatPart(torch.Size((2, 3)), 2, torch.tensor([2.0, 3.0]))
        >>> part.shape, part.to_local()
        (torch.Size([2, 3]), tensor([2., 3.]))
        >>> part.boxes()
        [((0, 2), (1, 1), 0), ((1, 0), (1, 1), 1)]
    """

    start: int
    even: bool
    _run: Tensor

    @staticmethod
    def __new__(cls, shape: torch.Size, start: int, values: Tensor, even: bool = False) -> FlatPart:
        # no memory for the whole: only its shape, dtype and device
        make: Any = torch.Tensor._make_wrapper_subclass
        made: FlatPart = make(cls, shape, dtype=values.dtype, device=values.device)
        made.start, made.even, made._run = start, even, values.detach()
        return made

    @classmethod
    def of_span(cls, shape: torch.Size, dtype: torch.dtype, values: Tensor | None = None) -> FlatPart:
        """Create this rank's FlatPart of a tensor that is split evenly over the ranks.

        Args:
            shape: shape of the full tensor.
            dtype: dtype of newly allocated elements.
            values: this rank's elements, perhaps followed by padding; None: allocate without values.
        """
        start, size = span(shape.numel(), comm.rank(), comm.world_size())
        return cls(shape, start, torch.empty(size, dtype=dtype) if values is None else values[:size], even=True)

    def to_local(self) -> Tensor:
        """Return this rank's elements, without a copy."""
        return self._run

    def whole(self, device: torch.device) -> Tensor:
        """Gather the full tensor on a device that supports collectives. Collective."""
        # a sum with zeros, because the ranks' parts may have different lengths
        made = torch.zeros(self.shape.numel(), dtype=self.dtype, device=device)
        made[self.start : self.start + self._run.numel()] = self._run.to(device)
        return comm.all_reduce(made, "sum").view(self.shape)

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Return (offsets, sizes, start) for each rectangular box that this rank's elements fill.

        ``start`` is the index of the box's first element among this rank's elements.
        """
        return list(_boxes(tuple(self.shape), self.start, self.start + self._run.numel()))

    def box(self, offsets: torch.Size, values: Tensor) -> Tensor:
        """Return, as a view, the part of ``values`` for the box at these offsets.

        ``values`` has one element for each of this rank's elements.
        """
        for corner, sizes, place in self.boxes():
            if corner == tuple(offsets):
                numel = torch.Size(sizes).numel()
                return values[place : place + numel].view(sizes)
        raise ValueError(f"none of this rank's parts of the tensor starts at the offsets {tuple(offsets)}")

    # -- the interface of torch's distributed checkpoint

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from lockstep.checkpoint.dcp import items_of

        return items_of(fqn, self.shape, self._run, [box[:2] for box in self.boxes()])

    def __create_chunk_list__(self) -> list[Any]:
        from lockstep.checkpoint.dcp import chunks_of

        return chunks_of(box[:2] for box in self.boxes())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.box(index.offset, self._run)

    # -- the interface of torch's tensors

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own subclasses have it
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func}: this rank has {next(iter(args))!r}, which supports no operations. Use this rank's "
            "elements, `to_local()`, or the full tensor, `whole(device)`."
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch's has one of its own
        stop = self.start + self._run.numel()
        return f"FlatPart(shape={tuple(self.shape)}, elements {self.start} to {stop}, {self.dtype})"


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, place: int = 0
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split a range of flattened elements into boxes: the end of one row, complete rows, the start of the last row."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield (start,)[: len(shape)], (stop - start,)[: len(shape)], place
        return
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _inner(shape, last, start - last * row, stop - last * row, place)
        return
    yield from _inner(shape, first - 1, start - (first - 1) * row, row, place)
    if last > first:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), place + first * row - start
    yield from _inner(shape, last, 0, stop - last * row, place + last * row - start)


def _inner(
    shape: tuple[int, ...], row: int, start: int, stop: int, place: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    for corner, sizes, inner in _boxes(shape[1:], start, stop, place):
        yield (row, *corner), (1, *sizes), inner
