"""Who failed first."""

from __future__ import annotations

import re

import pytest

from lockstep.checkpoint.sharded import OnRank
from lockstep.ground.errors import RankFailed
from lockstep.launch.processes import Ended
from lockstep.supervise.causes import Cause, Divergence, cause_of, endless_wait, first_cause
from lockstep.supervise.mailbox import Mailbox, leave_note
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack import LOCKSTEP, TORCH, Frame, Stack


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
    assert note.reason == r"ValueError: no such\nfile"
    assert note.location.startswith(__file__)
    assert "Traceback" in note.trace
    assert str(note) == f"rank 2 failed first, at {note.location}: ValueError: no such\\nfile"


class Mute(RuntimeError):
    def __str__(self) -> str:
        return str(self.detail)  # type: ignore[attr-defined]  # of another process, which has pickled it


def test_an_exception_that_cannot_say_what_it_is_is_named() -> None:
    """Its place was taken by what its `__str__` raised."""
    assert cause_of(1, caught(Mute("lost"))).reason.endswith("Mute: <exception str() failed>")


def test_notes_come_in_order_of_time_and_the_last_of_each_rank_counts() -> None:
    notes = Mailbox()
    for note in (cause(1, 5.0), cause(0, 3.0), cause(1, 2.0)):
        leave_note(notes.address, note)
    assert notes.read() == [cause(1, 2.0), cause(0, 3.0)]
    notes.close()


KILLED = Ended(1, 100, -9, at=10.0)
FAILED = Ended(2, 101, 1, at=10.2)


def lost(rank: int, at: float, doing: str = "reducing gradients in backward", call: int = 1) -> Cause:
    """A collective raised, as it does when another rank is gone."""
    return Cause(rank, at, "RuntimeError: Connection closed by peer", "train.py:9", "trace", call, True, doing)


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


EXITED = Ended(1, 100, 0, at=10.0)
LEFT = RankPosition(1, 8.0, 1, False, "train.py:9")


@pytest.mark.parametrize(
    ("ended", "noted", "positions", "says"),
    [
        pytest.param([], [lost(0, 9.0), cause(1, 9.2)], {}, "rank 1 failed first", id="the loss is seen first"),
        pytest.param([EXITED], [lost(0, 9.9)], {}, r"rank 1 \(process 100\) ended in the middle", id="os._exit(0)"),
        pytest.param(
            [],
            [lost(0, 9.0)],
            {1: LEFT, 0: RankPosition(0, 1.0, 1, True, "train.py:9")},
            "rank 1 left the call at train.py:9, and rank 0 waits for it in reducing gradients",
            id="one came out early",
        ),
        pytest.param(
            [],
            [lost(0, 9.0), lost(1, 9.1, "strategy.barrier")],
            {},
            "different places: rank 0 in reducing gradients .*; rank 1 in strategy.barrier",
            id="the calls do not match",
        ),
        pytest.param([], [lost(0, 9.0), lost(1, 9.1)], {}, "rank 0 failed first", id="the network failed"),
    ],
)
def test_a_lost_connection_is_a_consequence(
    ended: list[Ended], noted: list[Cause], positions: dict[int, RankPosition], says: str
) -> None:
    """The innocent rank, whose connection was closed, was named as the one that had failed first."""
    assert re.search(says, str(first_cause(ended, noted, positions)))


def test_an_exception_that_a_script_caught_is_the_cause_of_what_others_lose() -> None:
    caught_one = cause(1, 8.0)
    assert first_cause([], [lost(0, 9.0)], {}, [caught_one]) == caught_one
    assert first_cause([], [cause(0, 9.0)], {}, [caught_one]) == cause(0, 9.0)


def stack(*functions: str) -> Stack:
    files = {"all_reduce": f"{TORCH}distributed/distributed_c10d.py", "finish": f"{LOCKSTEP}engines/ddp/reducer.py"}
    files["barrier"] = f"{LOCKSTEP}engines/collectives.py"
    return Stack(tuple(Frame(files.get(name, f"{name}.py"), 7, name) for name in functions))


BACKWARD, BARRIER, OWN = stack("finish", "train"), stack("all_reduce", "barrier", "train"), stack("train")


def inside(*calls: int) -> dict[int, RankPosition]:
    return {rank: RankPosition(rank, 1.0, call, True, "train.py:7") for rank, call in enumerate(calls)}


def test_what_another_ranks_error_makes_of_a_rank_is_never_the_first_cause() -> None:
    """A full disk on rank 0 was told as rank 1's failure, which had said so a moment earlier."""
    follows = cause_of(1, RankFailed("rank 0 could not write the checkpoint 'last.ckpt': OSError: no room", 0))
    true = cause_of(0, OSError(28, "no room"))
    assert follows.lost
    assert first_cause([], [follows, true]) is true
    assert first_cause([Ended(1, 7, 1, follows.at)], [follows, true]) is true
    assert cause_of(1, OnRank("rank 0: OSError")).lost


def test_ranks_that_wait_at_different_places_have_strayed() -> None:
    found = endless_wait(inside(1, 1, 1), {0: BACKWARD, 1: BACKWARD, 2: BARRIER}, everyone=True)
    assert re.search("rank 2 in strategy.barrier .*; ranks 0, 1 in reducing gradients", str(found))


@pytest.mark.parametrize(
    ("positions", "stacks", "everyone"),
    [
        pytest.param(inside(1, 1), {0: BACKWARD, 1: BACKWARD}, True, id="at the same place"),
        pytest.param(inside(1, 1), {0: BARRIER}, True, id="one of them works"),
        pytest.param(inside(1, 1), {0: BARRIER, 1: OWN}, True, id="one of them is in its own code"),
        pytest.param(inside(1, 1), {0: BARRIER, 1: BACKWARD}, False, id="there are ranks on other nodes"),
        pytest.param({**inside(2), 1: LEFT}, {0: BARRIER}, True, id="the other one has not come to this call yet"),
    ],
)
def test_ranks_that_may_go_on_have_not_strayed(
    positions: dict[int, RankPosition], stacks: dict[int, Stack], everyone: bool
) -> None:
    assert endless_wait(positions, stacks, everyone) is None


def test_who_waits_for_one_that_left_or_ended_has_strayed() -> None:
    assert "rank 1 left the call" in str(endless_wait({**inside(1), 1: LEFT}, {0: BARRIER}, everyone=False))
    ended = RankPosition(1, 8.0, 0, False, "", ended=True)
    assert "rank 1 made no call and ended" in str(endless_wait({**inside(1), 1: ended}, {0: BARRIER}, True))
    assert isinstance(endless_wait({**inside(2), 1: ended}, {0: BARRIER}, True), Divergence)
