"""Who failed first."""

from __future__ import annotations

import os

import pytest

from lockstep.launch.causes import Cause, Notes, cause_of, first_cause, leave_note
from lockstep.launch.children import Ended


def caught(error: Exception) -> Exception:
    try:
        raise error
    except Exception as same:
        return same


def cause(rank: int, at: float) -> Cause:
    return Cause(rank, at, "ValueError: no", "train.py:3", "trace")


def test_a_note_says_what_and_where() -> None:
    note = cause_of(2, caught(ValueError("no such\nfile")))
    assert note.rank == 2
    assert note.reason == "ValueError: no such\nfile"
    assert note.place.startswith(__file__)
    assert "Traceback" in note.trace
    assert str(note) == f"rank 2 failed first, at {note.place}: ValueError: no such\nfile"


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert cause_of(0, KeyError("x")).place == "an unknown place"


def test_notes_come_in_order_of_time_and_the_last_of_each_rank_counts() -> None:
    notes = Notes()
    for note in (cause(1, 5.0), cause(0, 3.0), cause(1, 2.0)):
        leave_note(notes.address, note)
    assert notes.read() == [cause(1, 2.0), cause(0, 3.0)]
    notes.close()


def test_a_process_that_got_only_the_address_writes_nowhere() -> None:
    notes, other = Notes(), Notes()
    foreign = f"{other.descriptor}:{notes.address.split(':')[1]}"
    leave_note(foreign, cause(1, 1.0))
    assert other.read() == notes.read() == []
    address = notes.address
    notes.close()
    other.close()
    leave_note(address, cause(1, 1.0))


def test_a_note_survives_a_full_disk() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        leave_note(f"{full.fileno()}:{os.fstat(full.fileno()).st_ino}", cause(1, 1.0))


KILLED = Ended(1, 100, -9, at=10.0)
FAILED = Ended(2, 101, 1, at=10.2)


@pytest.mark.parametrize(
    ("ended", "noted", "first"),
    [
        pytest.param([], [], None, id="nothing failed"),
        pytest.param([KILLED], [], KILLED, id="killed, nobody else noticed"),
        pytest.param([KILLED], [cause(0, 9.99)], KILLED, id="the others lose their connection as it is killed"),
        pytest.param([FAILED], [cause(2, 9.5)], cause(2, 9.5), id="an exception ended the process"),
        pytest.param([FAILED, KILLED], [cause(2, 3.0)], cause(2, 3.0), id="killed long after an exception elsewhere"),
        pytest.param([], [cause(0, 1.0), cause(2, 2.0)], cause(0, 1.0), id="the earliest exception"),
    ],
)
def test_first_cause(ended: list[Ended], noted: list[Cause], first: Ended | Cause | None) -> None:
    assert first_cause(ended, noted) == first
