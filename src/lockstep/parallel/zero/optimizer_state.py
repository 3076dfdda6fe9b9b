"""An optimizer's state in two forms: whole, as ``state_dict`` has it, and in the fragments that a rank works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.zero.flat_parameters import Flat, Piece

State = dict[str, Any]


def cut_state(piece: Piece, whole: Mapping[str, Any], optimizer: Any) -> State:
    """This rank's part of a parameter's state.

    Args:
        piece: of which parameter.
        whole: tensors of the parameter's shape, and what belongs to the parameter as a whole (a count of steps).
        optimizer: for the error.

    Raises:
        ValueError: for a tensor of another shape.
    """
    shape = piece.parameter.shape
    part: State = {}
    for key, value in whole.items():
        if isinstance(value, Tensor) and value.dim():
            if value.shape != shape:
                raise ValueError(_odd(optimizer, key, value.shape, shape))
            part[key] = piece.cut(value.to(piece.parameter.device)).clone()
        else:
            part[key] = value.clone() if isinstance(value, Tensor) else value
    return part


def whole_states(
    flats: Sequence[Flat],
    state_of: Callable[[Piece], Mapping[str, Any]],
    optimizer: Any,
    group: comm.Group,
    only: int | None = None,
) -> Iterator[tuple[Piece, str, Any]]:
    """Join the ranks' parts of the state, one bucket and one key after another. A collective.

    Args:
        flats: the layout.
        state_of: this rank's part of a parameter's state.
        optimizer: for the error.
        group: the ranks.
        only: the rank that gets what is joined; None is all.

    Yields:
        parameter, key and value: a tensor of the parameter's shape, or what belongs to the parameter as a whole;
        the value is None on ranks that do not get it.

    Raises:
        ValueError: on all ranks, for a tensor that is no fragment.
    """
    everything: dict[tuple[int, int], dict[str, Any]] = {}
    for described in comm.all_gather_object(_describe(flats, state_of, optimizer), group):
        if isinstance(described, str):
            raise ValueError(described)
        for place, state in described.items():
            everything.setdefault(place, state)
    for flat in flats:
        mine = {index: state for (of, index), state in sorted(everything.items()) if of == flat.index}
        kinds = {(key, what.dtype): None for state in mine.values() for key, what in state.items() if _is_cut(what)}
        joined = {}
        for key, dtype in kinds:
            holders = [index for index, state in mine.items() if _is_cut(state.get(key)) and state[key].dtype == dtype]

            def fill(part: Tensor, key: str = key, holders: list[int] = holders, flat: Flat = flat) -> None:
                for index in holders:
                    piece = flat.pieces[index]
                    if piece.value is not None:
                        piece.part_of(part).copy_(state_of(piece)[key])

            whole = flat.gather(dtype, fill, only)
            for index in holders:
                joined[index, key] = None if whole is None else flat.pieces[index].joined(whole)
        for index, state in mine.items():
            for key, what in state.items():
                if isinstance(what, _Number):
                    yield flat.pieces[index], key, what.value.to(flat.device) if what.on_device else what.value
                else:
                    yield flat.pieces[index], key, joined[index, key] if _is_cut(what) else what


class _Number:
    """A tensor without dimensions, on its way over the CPU."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.on_device = value.detach().cpu(), value.device.type != "cpu"


class _Cut:
    """Stands for a tensor of which each rank has a fragment."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _is_cut(value: Any) -> bool:
    return isinstance(value, _Cut)


def _describe(flats: Sequence[Flat], state_of: Callable[[Piece], Mapping[str, Any]], optimizer: Any) -> Any:
    """What this rank has, by bucket and place in it; a sentence where there is something that cannot be joined."""
    described: dict[tuple[int, int], dict[str, Any]] = {}
    for flat in flats:
        for index, piece in enumerate(flat.pieces):
            if piece.value is None:
                continue
            state = state_of(piece)
            if state:
                entry = described[flat.index, index] = {}
                for key, value in state.items():
                    if not isinstance(value, Tensor):
                        entry[key] = value
                    elif value.dim() == 0:
                        entry[key] = _Number(value)
                    elif value.shape == (piece.stop - piece.start,):
                        entry[key] = _Cut(value.dtype)
                    else:
                        return _odd(optimizer, key, value.shape, (piece.stop - piece.start,))
    return described


def _odd(optimizer: Any, key: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    return (
        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(shape)} for a tensor of shape {tuple(expected)}: "
        "it is not elementwise, and cannot be sharded; leave it unsharded (shard_optimizer=False)"
    )
