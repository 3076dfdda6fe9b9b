"""Who diverges: proofs from traces, stacks and states; and what is no proof."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.supervise.changes import Changes, apply
from lockstep.supervise.hang import diverged, overdue, stopped
from lockstep.supervise.hang_text import describe
from lockstep.supervise.snapshot import GONE, RUNS, STOPPED, TRACED, RankSnapshot
from lockstep.supervise.stack import TORCH, Frame, Stack
from lockstep.supervise.trace_memory import Note
from tests.launch.played import FIT, REDUCING, WORKING, note, past, position

NOW = 100.0
LOADING = Stack((Frame("/me/data.py", 12, "__getitem__"), Frame(f"{TORCH}utils/data/_utils/fetch.py", 2, "fetch"), FIT))


def snapshot(rank: int, *notes: Note, **changed: Any) -> RankSnapshot:
    return RankSnapshot(rank, NOW, position(rank), notes=notes, **changed)


def text(snapshots: list[RankSnapshot]) -> str:
    return str(diverged(snapshots) or stopped(snapshots) or "")


def test_two_operations_as_one_collective_are_a_proof() -> None:
    ranks = [
        snapshot(0, note(417, "barrier", location="/me/save.py:31", function="save")),
        snapshot(1, note(417, phase="on_validation_epoch_end", location="/me/train.py:88")),
        snapshot(2, past(416)),
    ]
    assert text(ranks) == (
        "the ranks' calls do not match: rank 0 waits in barrier #417, /me/save.py:31 (save); rank 1 waits in "
        "all_reduce #417, /me/train.py:88 (on_validation_epoch_end). All ranks must make the same calls."
    )


def test_it_is_one_also_when_all_have_gone_on() -> None:
    """Two calls of one size in swapped order are silent garbage on gloo."""
    ranks = [snapshot(0, past(9), past(8, "broadcast"), past(7)), snapshot(1, past(9), past(8), past(7))]
    assert "rank 0 called broadcast #8, /me/train.py:8 (training_step); rank 1 called all_reduce #8" in text(ranks)


@pytest.mark.parametrize(
    "other",
    [
        note(417, "barrier", whole=False),  # something of that group went past the gate
        note(417, "barrier", group="1"),
        note(417, "barrier", members=(0, 1)),
        note(418, "barrier"),  # a fast rank, the other still at the end of its own
        note(0, "recv"),
    ],
)
def test_what_may_be_different_is_no_proof(other: Note) -> None:
    assert text([snapshot(0, note(417)), snapshot(1, other)]) == ""


def test_a_stopped_rank_for_which_others_wait_is_given_up() -> None:
    halted = snapshot(1, past(4), state=STOPPED, stopped=3.0)
    waiting = snapshot(0, stack=REDUCING, still=4.0)
    assert text([waiting, halted]) == (
        "rank 1 is stopped, /me/train.py:4 (SIGSTOP), and rank 0 waits in reducing gradients in backward, /me/fit.py:7"
    )
    assert "rank 1 is stopped in all_reduce #4, /me/train.py:4" in text([waiting, replace(halted, notes=(note(4),))])
    assert text([waiting, replace(halted, stopped=0.9)]) == ""
    assert text([waiting, replace(halted, state=TRACED)]) == ""  # somebody debugs it
    assert text([replace(waiting, stack=WORKING), halted]) == ""  # nobody waits
    assert text([replace(waiting, state=STOPPED, stopped=3.0), halted]) == ""  # the whole job is suspended
    assert text([replace(waiting, state=GONE), halted]) == ""


def test_who_waits_for_whom_is_told() -> None:
    ranks = [
        snapshot(0, note(417, "barrier", location="/me/save.py:31", function="save"), state=RUNS),
        snapshot(1, note(417, phase="on_validation_epoch_end", batch=7)),
        snapshot(2, past(416), stack=replace(LOADING, phase="training_step", batch=1204), still=55.0),
    ]
    found = overdue(ranks, 60.0)
    assert found is not None
    assert str(found) == (
        "for 60 s, rank 2 is in its data loader, /me/data.py:12 (since batch 1204); rank 0 waits in barrier #417, "
        "/me/save.py:31 (save); rank 1 waits in all_reduce #417, /me/train.py:417 (on_validation_epoch_end, batch 7)"
    )
    assert found.trace == (
        "rank 2:\n    /me/fit.py:7 in <module>\n    torch/utils/data/_utils/fetch.py:2 in fetch\n"
        "    /me/data.py:12 in __getitem__"
    )
    assert overdue(ranks, 60.5) is None


def test_a_worker_of_a_loader_tells_where_it_is() -> None:
    queue = Stack((Frame(f"{TORCH}utils/data/dataloader.py", 2, "_get_data"), FIT))
    assert describe(snapshot(2, stack=queue, worker=LOADING)) == "is in its data loader, /me/data.py:12"


def test_what_has_changed_of_ranks_travels_as_json() -> None:
    one = snapshot(1, note(3), past(2), stack=REDUCING, worker=LOADING, state=STOPPED, stopped=2.5)
    other = snapshot(2, note(3), stack=WORKING)
    later = [replace(one, at=one.at + 1, stopped=3.5), replace(other, at=other.at + 1, stack=None, notes=(note(4),))]
    changes, there, sizes = Changes(), {}, []
    for told in ([one, other], later, later):
        message = json.dumps(changes.of(told, told[0].at))
        changes.keep()
        there = apply(there, json.loads(message))
        sizes.append(len(message))
    assert there == {1: later[0], 2: later[1]}
    assert sizes[2] < 60 < sizes[1] < sizes[0]


def test_a_call_of_autograds_is_where_the_backward_was_called() -> None:
    backward = Stack((Frame(f"{TORCH}autograd/graph.py", 5, "backward"), Frame("/me/train.py", 140, "training_step")))
    ranks = [snapshot(0, note(4, location=""), stack=backward), snapshot(1, note(4, "barrier"), stack=WORKING)]
    assert "rank 0 waits in all_reduce #4, /me/train.py:140 (training_step)" in text(ranks)
    ranks[0] = replace(ranks[0], notes=(past(4, location=""),))
    assert "rank 0 called all_reduce #4, /me/fit.py:7 (training_step)" in text(ranks)
