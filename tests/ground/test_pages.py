"""Common pages: all ranks see what one writes, a lack of memory is known to all, and no file is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.ground import comm, shared_pages
from tests.tools.pool import RankPool

SIZE = 3 * 4096


def _own_files() -> list[str]:
    """Of this process: other runs on this machine have theirs."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"lockstep-{os.getpid()}-*"))


def _written(named: bool) -> tuple[bytes, str, list[str]]:
    """What a rank sees when each has written its number, where the pages lie, and what files there are."""
    unnamed, rank = shared_pages._unnamed, dist.get_rank()
    if named:
        shared_pages._unnamed = _refuse
    try:
        found = shared_pages.common_pages(None, SIZE, part=(rank * 4096, 4096))
    finally:
        shared_pages._unnamed = unnamed
    assert found is not None
    comm.barrier()  # now rank 0, too, has returned
    where = os.readlink(f"/proc/self/fd/{found.handle}")
    files = _own_files()
    assert bytes(found.memory) == bytes(SIZE)
    comm.barrier()
    found.memory[rank * 4096] = rank + 1
    comm.barrier()
    os.close(found.handle)
    return bytes(found.memory[index * 4096] for index in range(3)), where, files


def _refuse(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_all_see_what_one_writes_and_there_is_no_file(ranks: RankPool) -> None:
    for seen, where, files in ranks(3).run(_written, False):
        assert seen == bytes([1, 2, 3])
        assert "memfd:lockstep" in where
        assert files == []


def test_a_file_is_taken_where_memory_needs_a_name_and_unlinked_at_once(ranks: RankPool) -> None:
    for seen, where, files in ranks(3).run(_written, True):
        assert seen == bytes([1, 2, 3])
        assert where.startswith("/dev/shm/lockstep-")
        assert where.endswith("(deleted)")
        assert files == []


def _elsewhere() -> tuple[bool, bool, list[str]]:
    """Rank 1 in a container of its own: a process id means nothing to it, a file in common memory does."""
    original = shared_pages.space
    if dist.get_rank() == 1:
        shared_pages.space = lambda: "pid:[1]"
    try:
        named = shared_pages.common_pages(None, SIZE)
        folder, shared_pages.FOLDER = shared_pages.FOLDER, "/dev/no such folder"
        nothing = shared_pages.common_pages(None, SIZE)
    finally:
        shared_pages.space, shared_pages.FOLDER = original, folder
    assert named is not None
    os.close(named.handle)
    return True, nothing is None, _own_files()


def test_ranks_in_containers_meet_in_a_file_or_not_at_all(ranks: RankPool) -> None:
    assert ranks(2).run(_elsewhere) == [(True, True, [])] * 2


def test_a_full_memory_folder_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reserve = os.posix_fallocate
    calls = []

    def full_twice(handle: int, offset: int, length: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{handle}"))
        if len(calls) <= 2:
            raise OSError(28, "No space left on device")
        reserve(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_twice)
    monkeypatch.setattr(shared_pages.tempfile, "gettempdir", lambda: str(tmp_path))
    found = shared_pages.common_pages(None, 4096, on_disk=True)
    assert found is not None
    assert bytes(found.memory) == bytes(4096)
    os.close(found.handle)
    assert [Path(path).parent for path in calls] == [Path("/"), Path("/dev/shm"), tmp_path]
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_process_of_that_id_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc may be that of another space, and a machine the copy of another, with the same numbers of files."""
    ours, other = shared_pages._make(shared_pages._unnamed, 4096), shared_pages._make(shared_pages._unnamed, 4096)
    assert ours is not None
    assert other is not None
    right = shared_pages._open(ours[1])
    assert right is not None
    mistaken = other[1]._replace(path=ours[1].path, identity=ours[1].identity)
    opened: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *arguments: opened.append(arguments) or right)
        assert shared_pages._open(mistaken) is None
    assert opened == []
    for handle in (right, ours[0], other[0]):
        os.close(handle)


def test_a_file_that_somebody_has_tidied_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one on rank 0 alone, and the others waited for it."""
    gone: list[str] = []
    unlink = os.unlink

    def tidied(path: str) -> None:
        unlink(path)
        gone.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(shared_pages, "_unnamed", _refuse)
    monkeypatch.setattr(os, "unlink", tidied)
    found = shared_pages.common_pages(None, 4096)
    assert found is not None
    os.close(found.handle)
    assert len(gone) == 1
