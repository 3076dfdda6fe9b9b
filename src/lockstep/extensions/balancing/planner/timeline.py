"""What the ranks of a pipeline do, and when: a schedule played with the seconds of each stage.

play([0.003, 0.004], actions_of("1f1b", ranks=2, micro_batches=4))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

SHARES = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
"""By torch's letters, the share of a micro-batch's seconds: forward, backward, and a backward in two parts, that for
the input and that for the weights."""
BETWEEN = 2 / 3
"""Bytes of the gradients that wait for the weights' part of a backward, for each byte of activations: as in a GPT, an
MLP and an MLP-Mixer, where they were 0.5 to 1."""
IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules by which micro-batches go in rounds of about as many as there are ranks; a rank may have several stages."""
STAGES_OF_RANK = {"interleaved": 2}
"""Stages of a rank by a schedule, where nobody says how many; of the others one."""


class Action(NamedTuple):
    """Something that a rank is to compute.

    Attributes:
        stage, number: for which stage, and for which micro-batch.
        letter: of `SHARES`.
    """

    stage: int
    number: int
    letter: str


class Played(NamedTuple):
    """An action, and when it is done.

    Attributes:
        row: the rank's place in its pipeline.
        action: of the rank.
        begin, end: seconds.
    """

    row: int
    action: Action
    begin: float
    end: float


def actions_of(schedule: str, ranks: int, micro_batches: int, each: int = 1) -> list[list[Action]]:
    """What each rank of a pipeline computes, in its order.

    Args:
        schedule: in any case: "gpipe"; "1f1b", which with fewer micro-batches than ranks is "gpipe"; "interleaved" and
            "zero-bubble", which are torch's tables.
        ranks: of the pipeline.
        micro_batches: of a step; in the last two schedules they go in rounds of equal size.
        each: stages of a rank, by the last two; the stages go round the ranks.

    Example:
        >>> [[f"{action.letter}{action.number}" for action in actions] for actions in actions_of("1f1b", 2, 2)]
        [['F0', 'F1', 'B0', 'B1'], ['F0', 'B0', 'F1', 'B1']]
    """
    schedule = schedule.lower()
    if schedule in ("1f1b", "gpipe"):
        alternates = schedule == "1f1b" and micro_batches >= ranks
        ahead = [ranks - rank if alternates else micro_batches for rank in range(ranks)]
        return [list(_of_one_stage(rank, micro_batches, ahead[rank])) for rank in range(ranks)]
    from torch.distributed.pipelining import schedules

    # the tables are made from the numbers of one rank's stages, and hold all ranks
    numbers = {"group_size": ranks, "group_rank": 0, "num_stages": each * ranks}
    stages: list[Any] = [SimpleNamespace(**numbers, submod=None) for _ in range(each)]
    kinds = {"interleaved": schedules.ScheduleInterleaved1F1B, "zero-bubble": schedules.ScheduleInterleavedZeroBubble}
    # to add messages to a table of many ranks takes seconds, and they are not needed
    kind = type("Table", (kinds[schedule],), {"_prepare_schedule_with_comms": lambda self, table: None})
    table = kind(stages, micro_batches).pipeline_order
    there = [[action for action in table[rank] if action is not None] for rank in range(ranks)]
    return [[Action(t.stage_index, t.microbatch_index or 0, t.computation_type.value) for t in mine] for mine in there]


def _of_one_stage(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    """So many forwards run before the first backward."""
    for number in range(min(ahead, micro_batches)):
        yield Action(stage, number, "F")
    for number in range(micro_batches):
        yield Action(stage, number, "B")
        if ahead + number < micro_batches:
            yield Action(stage, ahead + number, "F")


def held(actions: Sequence[Action]) -> dict[int, float]:
    """Micro-batches whose activations a rank holds at a time, at most, for each of its stages.

    Between the two parts of a backward gradients are held beside the activations.

    Example:
        >>> [held(actions) for actions in actions_of("1f1b", 2, 4)]
        [{0: 2.0}, {1: 1.0}]
    """
    change = {"F": 1.0, "B": -1.0, "I": BETWEEN, "W": -1.0 - BETWEEN}
    now: dict[int, float] = {}
    most: dict[int, float] = {}
    for action in actions:
        now[action.stage] = now.get(action.stage, 0.0) + change[action.letter]
        most[action.stage] = max(now[action.stage], most.get(action.stage, 0))
    return most


def in_one_row(actions: Sequence[Sequence[Action]]) -> list[Action]:
    """The actions of all ranks as one process does them that has all stages: by the time at which ranks begin them.

    Each comes behind all that it needs.

    Args:
        actions: of each rank, whose stages take equal times.

    Example:
        >>> [f"{each.stage}{each.letter}{each.number}" for each in in_one_row(actions_of("1f1b", 2, 2))]
        ['0F0', '0F1', '1F0', '1B0', '0B0', '1F1', '1B1', '0B1']
    """
    stages = 1 + max(action.stage for mine in actions for action in mine)
    return [each.action for each in sorted(play([1.0] * stages, actions), key=lambda each: each.begin)]


def play(seconds: Sequence[float], actions: Sequence[Sequence[Action]]) -> list[Played]:
    """What each rank does when; a forward takes a third of a micro-batch's time.

    Args:
        seconds: of a micro-batch on each stage, forward and backward.
        actions: of each rank.

    Raises:
        ValueError: actions wait for one another.

    Example:
        >>> max(each.end for each in play([3.0, 3.0], actions_of("gpipe", 2, 2)))
        9.0
    """
    last = len(seconds) - 1
    ended: dict[Action | None, float] = {None: 0.0}
    free, found = [0.0] * len(actions), list[Played]()
    waiting = [deque(mine) for mine in actions]
    while any(waiting):
        before = len(found)
        for row, mine in enumerate(waiting):
            while mine and _needs(mine[0], last) in ended:
                action = mine.popleft()
                begin = max(free[row], ended[_needs(action, last)])
                free[row] = begin + seconds[action.stage] * SHARES[action.letter]
                # who needs a backward needs its part for the input
                ended[action._replace(letter="B") if action.letter == "I" else action] = free[row]
                found.append(Played(row, action, begin, free[row]))
        if len(found) == before:
            raise ValueError("the actions of the ranks wait for one another")
    return found


def _needs(action: Action, last: int) -> Action | None:
    """The action behind which another one can begin; None: it needs none."""
    stage, number, letter = action
    if letter == "F":
        return Action(stage - 1, number, "F") if stage else None
    if letter == "W":
        return Action(stage, number, "B")
    return Action(stage, number, "F") if stage == last else Action(stage + 1, number, "B")
