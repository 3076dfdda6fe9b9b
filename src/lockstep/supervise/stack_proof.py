"""A proof by stacks that ranks wait for what cannot come: where those stand that do nothing, asked twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from lockstep.supervise.causes import Divergence, has_left, strayed
from lockstep.supervise.snapshot import SLEEPS, RankSnapshot
from lockstep.supervise.stack import Stack

QUIET = 2.0
"""Seconds without any work of the processor after which a rank is asked where it is."""

QUIET_AT_FIRST = 3.0
"""The same while ranks connect to one another, which a signal disturbs, and where nobody looks for hangs."""

AGAIN = 0.3
"""Seconds from the answers to one question to the next question."""

SOON = 1.0
"""Seconds to the next question at the least where a rank that does nothing could not answer."""

UNANSWERED = 5.0
"""Seconds after which a question that some node has not answered is put anew."""

LONGEST = 60.0
"""Seconds from one proof that failed to the next at the most."""


def is_idle(snapshot: RankSnapshot) -> bool:
    """Whether a rank in a call has done nothing for so long that it may wait for another."""
    stand = snapshot.stand
    connects = stand.hang_timeout is None and stand.hang_kill is None
    quiet = QUIET_AT_FIRST if connects else QUIET
    return stand.inside and snapshot.state == SLEEPS and snapshot.still >= quiet


class StackProof:
    """Two questions for the stacks of ranks that do nothing, and what was answered.

    All answers to the first question are there before the second is put. Where both answers are the same, there was a
    moment at which all ranks stood where they say.

    Args:
        size: ranks of all nodes; 0: nobody knows.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._lock = threading.Lock()  # answers of other nodes come in another thread
        self._is_open = False  # a question has been put, and nothing is concluded from its answers yet
        self._answers: dict[int, dict[int, RankSnapshot]] = {}
        self._before: dict[int, tuple[int, Stack | None]] | None = None  # what the first answers said
        self._next_at = self._put_at = self._wait = 0.0

    @property
    def is_pending(self) -> bool:
        """Whether answers are awaited, or the second question is to be put."""
        return self._is_open or self._before is not None

    def seek(
        self,
        every: Sequence[RankSnapshot],
        now: float,
        nodes: set[int],
        question: Callable[[], Mapping[int, RankSnapshot]],
    ) -> Divergence | None:
        """One look: put the question that is due, and conclude what its answers prove.

        Args:
            every: all ranks that are known, those included that have come out of their call, or to their end.
            now: the moment.
            nodes: those that have to answer, this one included.
            question: puts it to the other nodes, and gives the ranks of this one that do nothing, with their stacks.
        """
        if not self._is_suspect(every):
            self._is_open, self._before, self._wait = False, None, 0.0
            return None
        if self.is_due(now, nodes):
            self.take(0, question())
        return self._conclude(every, now) if self.is_answered(nodes) else None

    def is_due(self, now: float, nodes: set[int]) -> bool:
        """Whether to put a question; if so, it counts as put."""
        if self._is_open and (self.is_answered(nodes) or now - self._put_at < UNANSWERED):
            return False
        if not self._is_open and now < self._next_at:
            return False
        with self._lock:
            self._is_open, self._put_at, self._answers = True, now, {}
        return True

    def take(self, node: int, answers: Mapping[int, RankSnapshot]) -> None:
        """The ranks of a node that have answered."""
        with self._lock:
            self._answers.setdefault(node, {}).update(answers)

    def is_answered(self, nodes: set[int]) -> bool:
        """Whether all nodes have answered the question of now."""
        with self._lock:
            return self._is_open and self._answers.keys() >= nodes

    def _is_suspect(self, every: Sequence[RankSnapshot]) -> bool:
        """Whether all ranks may be waiting, or some for one that has left."""
        idle = [each.stand.call for each in every if is_idle(each)]
        if not idle:
            return False
        first = min(idle)
        return len(idle) == len(every) >= self._size > 0 or any(has_left(each.stand, first) for each in every)

    def _conclude(self, every: Sequence[RankSnapshot], now: float) -> Divergence | None:
        """What two answers prove that are alike; after the first one the next question is due soon."""
        with self._lock:
            answers = {rank: each for node in self._answers.values() for rank, each in node.items()}
        stands = {each.rank: each.stand for each in every}
        stacks = {rank: each.stack for rank, each in answers.items() if each.stack is not None}
        found = strayed(stands, stacks, len(stands) >= self._size > 0)
        seen = {rank: (each.stand.call, each.stack) for rank, each in answers.items()}
        self._is_open = False
        if found is None:
            is_whole = all(each.rank in stacks for each in every if is_idle(each))  # else one was busy for a moment
            self._before, self._wait = None, min(LONGEST, 2 * self._wait + 1) if is_whole else max(self._wait, SOON)
            self._next_at = now + self._wait
            return None
        if self._before == seen:
            return found
        self._before, self._next_at = seen, now + AGAIN
        return None
