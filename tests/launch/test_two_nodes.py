"""Two nodes: what is proved, named and ended on one is on two."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.supervise import elsewhere
from lockstep.supervise.causes import Divergence
from lockstep.supervise.changes import plain_notes
from lockstep.supervise.elsewhere import NotesOfAll
from lockstep.supervise.hang_monitor import HangMonitor
from lockstep.supervise.snapshot import RUNS, RankPosition, RankSnapshot
from lockstep.supervise.stack import Stack
from lockstep.supervise.stack_proof import StackQuestion
from lockstep.supervise.trace_memory import Note
from tests.launch.played import IN_BARRIER, REDUCING, WORKING, End, note, position

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


class PlayedMonitor(HangMonitor):
    """Of one node of a world."""

    def __init__(self, world: World) -> None:
        super().__init__(End(world.ends), len(world.ranks))
        self.world = world

    def _snapshot(self, position: RankPosition, still: float, now: float) -> RankSnapshot:
        return replace(self.world.ranks[position.rank], at=now)

    def _with_stack(self, snapshot: RankSnapshot, now: float) -> RankSnapshot:
        return replace(snapshot, stack=self.world.stacks[snapshot.rank])


class World:
    """A rank on each of some nodes, played: what it does, and what its stack is when it is asked."""

    def __init__(self, nodes: int = 2, limit: float = 60.0) -> None:
        self.ends: list[End] = []
        self.limit = limit
        limits: dict[str, Any] = {"hang_timeout": limit, "hang_kill": 1800.0}
        self.ranks = [RankSnapshot(rank, 0.0, position(rank, **limits)) for rank in range(nodes)]
        self.stacks: list[Stack | None] = [WORKING] * nodes
        self.monitors = [PlayedMonitor(self) for _ in range(nodes)]
        self.now = time.monotonic()

    def wait(self, rank: int, stack: Stack | None, still: float = 3.0) -> None:
        self.ranks[rank], self.stacks[rank] = replace(self.ranks[rank], still=still), stack

    def look(self, later: float = 0.5) -> Divergence | None:
        """All nodes look, node 0 last."""
        self.now += later
        found = None
        for each in reversed(self.ranks):
            inside, outside = ({each.rank: each.position}, []) if each.position.inside else ({}, [each.position])
            found = self.monitors[each.rank].check(inside, {}, self.now, outside)
        return found

    def proves(self, looks: int = 8) -> Divergence | None:
        return next((found for found in (self.look() for _ in range(looks)) if found is not None), None)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return ticking(World(), monkeypatch)


def ticking(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Have what comes from other nodes be heard at the moment of the world."""
    monkeypatch.setattr(elsewhere, "time", SimpleNamespace(monotonic=lambda: world.now))
    return world


def test_ranks_that_wait_at_different_places_on_two_nodes_are_proved_to(world: World) -> None:
    """It ran on for half an hour: stacks proved something on one node only."""
    world.wait(0, IN_BARRIER)
    world.wait(1, REDUCING)
    assert str(world.proves()) == (
        "the ranks wait for one another at different places: rank 0 in barrier (/me/fit.py:7); "
        "rank 1 in reducing gradients in backward (/me/fit.py:7). All ranks must make the same calls."
    )


def test_ranks_that_wait_at_the_same_place_are_let_be(world: World) -> None:
    for rank in (0, 1):
        world.wait(rank, REDUCING)
    assert world.proves(40) is None
    assert world.ends[0].sent.count("wanted") < 20  # it is asked again ever later


def test_a_rank_that_goes_on_between_two_questions_proves_nothing(world: World) -> None:
    world.wait(0, IN_BARRIER)
    for step in range(40):
        other = Stack((replace(REDUCING.frames[0], line=step), *REDUCING.frames[1:]))
        world.wait(1, other)
        assert world.look() is None


def test_a_rank_that_works_or_does_not_answer_proves_nothing(world: World) -> None:
    world.wait(0, IN_BARRIER)
    world.wait(1, REDUCING)
    world.ranks[1] = replace(world.ranks[1], state=RUNS)
    assert world.proves() is None
    world.ranks[1] = replace(world.ranks[1], state="sleeps")
    world.stacks[1] = None
    assert world.proves() is None
    world.stacks[1] = REDUCING
    assert world.proves(20) is not None


def test_a_rank_that_cannot_answer_for_a_moment_is_asked_again_soon(world: World) -> None:
    """Each such moment doubled the time to the next question: on a busy machine nothing was proved for ten seconds."""
    world.wait(0, IN_BARRIER)
    world.wait(1, None)
    assert world.proves(16) is None
    world.wait(1, REDUCING)
    assert world.proves(6) is not None  # three seconds


def test_a_rank_that_has_left_its_call_on_another_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ticking(World(3), monkeypatch)
    world.wait(1, REDUCING)
    world.ranks[2] = replace(world.ranks[2], position=replace(world.ranks[2].position, inside=False))
    assert "rank 2 left the call at /me/fit.py:7, and rank 1 waits for it in reducing gradients" in str(world.proves())


def test_a_node_that_has_said_farewell_is_known_to_have_left(world: World) -> None:
    assert world.monitors[1].others is not None
    one = world.monitors[1].others.farewell([replace(world.ranks[1].position, inside=False, ended=True)])
    world.ends[0].hears["farewell"](1, json.loads(json.dumps(one)))
    world.ranks.pop()
    world.ends.pop()
    world.wait(0, REDUCING)
    assert "rank 1 left the call at /me/fit.py:7 and ended, and rank 0 waits for it" in str(world.proves())


def test_answers_to_an_older_question_do_not_count() -> None:
    question, one = StackQuestion(), RankSnapshot(1, 0.0, position(1))
    question.put(10.0)
    question.take(0, 1, {})
    assert question.answers({0, 1}, 12.0) is None
    assert question.answers({0, 1}, 15.0) == {}  # node 1 does not answer
    question.put(20.0)
    question.take(0, 2, {})
    question.take(1, 1, {1: one})
    assert question.answers({0, 1}, 21.0) is None
    question.take(1, 2, {1: one})
    assert question.answers({0, 1}, 21.0) == {1: one}
    assert question.answers({0, 1}, 40.0) is None  # what is concluded is concluded


# -- sizes


def of(elements: int, **changed: Any) -> Note:
    return note(7, payload=f"float32 ({elements},) SUM", elements=elements, location="/me/train.py:88", **changed)


def test_other_sizes_on_another_node_are_found_where_gloo_has_ended_a_rank() -> None:
    """It was told as "is gone: it was killed, or ended by os._exit"."""
    ends: list[End] = []
    made = {0: of(3), 1: of(5), 2: of(3, left=41.0)}
    nodes = [NotesOfAll(End(ends), lambda _, rank=rank: [([rank], made[rank].location, made[rank])]) for rank in made]
    found = str(nodes[0].compare(plain_notes([made[1]])))
    assert found.startswith(
        "the ranks' calls do not match: rank 0 waits in all_reduce #7 of float32 (3,) SUM, /me/train."
    )
    assert "; rank 1 waits in all_reduce #7 of float32 (5,) SUM, /me/train.py:88" in found
    assert "; rank 2 called all_reduce #7 of float32 (3,) SUM, /me/train.py:88" in found
    made[1] = of(3)
    assert nodes[0].compare(plain_notes([made[1]])) is None
