"""Where a rank's part of a tensor lies: as `torch.chunk` cuts it, once and again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lockstep.ground.parameters import box_in


@dataclass
class Mesh:
    """What is asked of a mesh, on one of its ranks."""

    shape: tuple[int, ...]
    place: tuple[int, ...] | None

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_coordinate(self) -> list[int] | None:
        return None if self.place is None else list(self.place)


def box(shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...] | None, placements: Any) -> Any:
    asked: Any = Mesh(mesh, place)
    return box_in(shape, asked, placements)


def cut(values: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    chunks = torch.chunk(values, parts)
    return chunks[number] if number < len(chunks) else values[:0]


@pytest.mark.parametrize("seed", range(20))
def test_a_part_lies_where_torch_has_cut_it(seed: int) -> None:
    drawn = random.Random(seed)
    size, data, tensor = drawn.randrange(1, 60), drawn.randrange(1, 6), drawn.randrange(1, 5)
    whole = torch.arange(size)
    for rank in range(data * tensor):
        at, beside = divmod(rank, tensor)
        mesh, place = (2, data, tensor), (1, at, beside)
        once = box((4, size), mesh, place, [Replicate(), Shard(1), Replicate()])
        assert whole[once[1]].tolist() == cut(whole, data, at).tolist()
        in_turn = box((4, size), mesh, place, [Replicate(), Shard(1), Shard(1)])
        assert whole[in_turn[1]].tolist() == cut(cut(whole, data, at), tensor, beside).tolist()
        again = box((4, size), mesh, place, [Replicate(), _StridedShard(1, split_factor=tensor), Shard(1)])
        assert whole[again[1]].tolist() == cut(cut(whole, tensor, beside), data, at).tolist()
        assert again[0] == slice(0, 4)


def test_words_of_gpt_2_on_4_x_2_were_of_two_ranks() -> None:
    """torch's own calculation begins the last part of the second half one row late."""
    places = [(at, beside) for beside in range(2) for at in range(4)]
    parts = [box((50257,), (4, 2), place, [_StridedShard(0, split_factor=2), Shard(0)])[0] for place in places]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 50257


def test_who_is_no_part_of_a_mesh_has_nothing() -> None:
    assert box((4, 3), (2,), None, [Shard(0)]) == (slice(0, 0), slice(0, 0))
