"""`rank_zero_only` and the messages of rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import pytest

from lockstep.ground.rank import (
    LIGHTNINGS,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
    warn_once,
)


@pytest.fixture(autouse=True)
def rank_put_back() -> Iterator[None]:
    before = rank_zero_only.rank
    rank_zero_only.rank = 0
    yield
    rank_zero_only.rank = before


def test_runs_on_rank_zero_alone_and_looks_the_rank_up_at_each_call() -> None:
    @rank_zero_only
    def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    assert double(4) == 8
    rank_zero_only.rank = 1
    assert double(4) is None
    assert (double.__name__, double.__doc__) == ("double", "Twice n.")


def test_warning_names_the_line_that_warned_and_comes_once_a_place() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            rank_zero_warn("here")
        rank_zero_warn("here")
        rank_zero_only.rank = 1
        rank_zero_warn("not on rank 1")
    assert [str(w.message) for w in seen] == ["here", "here"]
    assert all(w.filename == __file__ for w in seen)
    assert seen[1].lineno == seen[0].lineno + 1


def test_warn_once_comes_once_for_a_key() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for n in range(3):
            warn_once(f"batch {n} is odd", key="test_warn_once: odd batch")
    assert [str(w.message) for w in seen] == ["batch 0 is odd"]
    assert seen[0].filename == __file__


def test_messages_reach_the_screen_until_logging_is_configured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    for name in LIGHTNINGS:  # whose levels another test may have set
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    rank_zero_info("on the screen")
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    rank_zero_info("the user's handlers have it")
    assert capsys.readouterr().err == "on the screen\n"


def test_a_message_that_nobody_can_read_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit whose terminal was closed trained to its end, and died of its last message."""
    ear, mouth = os.pipe()
    os.close(ear)
    with contextlib.suppress(BrokenPipeError), open(mouth, "w") as closed:
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(sys, "stderr", closed)
        for name in LIGHTNINGS:
            monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
        rank_zero_info("the fit is over")
        monkeypatch.undo()
