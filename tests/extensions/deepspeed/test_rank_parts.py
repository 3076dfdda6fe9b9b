"""What each rank alone needs of a checkpoint in an engine's own format: rank 0 gets it, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lockstep.checkpoint import sharded
from lockstep.extensions.deepspeed.folder import EngineCheckpointIO
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)


def save(folder: Path, spoilt: int) -> tuple[list[dict[str, Any]], str]:
    """What this rank's engine was given to write, and why it could not be written."""
    rank, given = dist.get_rank(), list[dict[str, Any]]()

    def write(path: Path, content: dict[str, Any]) -> None:
        given.append(content)
        (path / str(rank)).write_text("its part")

    io = EngineCheckpointIO()
    io.save = write
    ranks: list[Any] = [{}] * dist.get_world_size()
    ranks[rank] = {"part": object() if rank == spoilt else rank}
    refused = mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("to every rank"))
    try:
        with refused:
            io.save_checkpoint({"epoch": 1, "lockstep": {"writer": {}, "ranks": ranks}}, folder)
    except Exception as error:
        return given, f"{type(error).__name__}: {error}"
    return given, ""


def test_rank_0_alone_gets_every_rank_s_part(ranks: RankPool, tmp_path: Path) -> None:
    """Each got all of them: 17.8 KB times the square of the number of ranks."""
    (zero, no_error), *others = ranks(3).run(save, tmp_path / "saved", -1)
    assert no_error == ""
    assert zero[0]["lockstep"]["ranks"] == [{"part": 0}, {"part": 1}, {"part": 2}]
    assert others == [([{}], "")] * 2
    assert (tmp_path / "saved" / sharded.INDEX).exists()


@pytest.mark.parametrize("spoilt", [0, 2])
def test_a_part_that_cannot_be_read_back_is_an_error_on_all(ranks: RankPool, spoilt: int, tmp_path: Path) -> None:
    for given, error in ranks(3).run(save, tmp_path / "saved", spoilt, timeout=30):
        assert given == []
        assert "part" in error
    assert not (tmp_path / "saved").exists()
