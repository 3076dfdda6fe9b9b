"""Limits of open files that are too low for a run."""

from __future__ import annotations

import resource

import pytest

from lockstep.cluster import limits
from lockstep.ground.errors import MisconfigurationException


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[soft, hard] limit that this process believes to have."""
    held = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: held.__setitem__(slice(None), list(both)))
    return held


def test_a_soft_limit_is_raised(limit: list[int]) -> None:
    """Ranks failed while they connected, with an error that named a socket."""
    limits.provide_files(300)
    assert limit == [1024, 1024]


def test_a_hard_limit_that_is_too_low_is_named_with_the_way_out(limit: list[int]) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"may open 1024 files \(`ulimit -Hn`\).*2048 ranks connects.*raise"
    ):
        limits.provide_files(2048)
