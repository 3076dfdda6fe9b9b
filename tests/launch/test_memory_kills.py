"""Was a process killed for lack of memory? By the count of its own cgroup, and the time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.launch import memory_kills
from lockstep.launch.memory_kills import CERTAIN, MemoryKills


def kills(file: Path, number: int) -> None:
    file.write_text(f"oom_kill_disable 0\noom_kill {number}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "vmstat"
    kills(found, 3)
    monkeypatch.setattr(memory_kills, "MACHINE", found)
    return found


def test_a_stranger_that_was_killed_for_memory_explains_nothing(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `kill -9` was called lack of memory wherever any process of the machine had been killed for it."""
    own = tmp_path / "memory.events"
    kills(own, 0)
    monkeypatch.setattr(memory_kills, "_events_of", lambda process: own)
    made = MemoryKills()
    made.add(7)
    kills(machine, 4)
    assert made.explain(7) == ""
    kills(own, 1)
    assert made.explain(7) == CERTAIN


@pytest.mark.parametrize(
    ("lines", "file"),
    [
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("0::/job\n", "job/memory.events"),
        ("0::/job-outside-of-the-container\n", "memory.events"),
        ("0::/../job\n", None),
    ],
)
def test_the_count_is_that_of_the_cgroup(
    lines: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_kills, "MOUNT", tmp_path)
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        kills(tmp_path / file, 0)
    read = Path.read_text
    own = f"/proc/{os.getpid()}/cgroup"
    monkeypatch.setattr(Path, "read_text", lambda path: lines if str(path) == own else read(path))
    assert memory_kills._events_of(os.getpid()) == (None if file is None else tmp_path / file)
