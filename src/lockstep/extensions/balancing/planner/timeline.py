"""Simulation of a pipeline's schedule with the seconds of each stage.

simulate([0.003, 0.004], actions_of("1f1b", ranks=2, micro_batches=4))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

SHARES = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}
"""Share of a micro-batch's seconds by torch's letters: forward, backward, and the two parts of a backward, for the
input and for the weights."""
BETWEEN = 2 / 3
"""Bytes of gradients between the two parts of a backward, for each byte of activations. Measured in a GPT, an MLP and
an MLP-Mixer: 0.5 to 1."""
IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules in which micro-batches go in rounds of about as many as there are ranks; a rank may have several stages."""
STAGES_OF_RANK = {"interleaved": 2}
"""Default number of stages of a rank by schedule; one for other schedules."""


class Action(NamedTuple):
    """One computation in a pipeline's schedule: a forward, a backward, or half of a backward.

    Attributes:
        stage: number of the stage.
        number: number of the micro-batch.
        letter: kind of computation, a key of `SHARES`.
    """

    stage: int
    number: int
    letter: str


class TimedAction(NamedTuple):
    """An action with its simulated start and end.

    Attributes:
        row: the rank in the pipeline.
        action: the rank's action.
        begin: seconds.
        end: seconds.
    """

    row: int
    action: Action
    begin: float
    end: float


def actions_of(schedule: str, ranks: int, micro_batches: int, each: int = 1) -> list[list[Action]]:
    """Return a list for each rank of a pipeline: the rank's actions, in the order in which they run.

    Args:
        schedule: "gpipe", "1f1b" ("gpipe" with fewer micro-batches than ranks), "interleaved" or "zero-bubble", in
            upper or lower case.
        ranks: number of ranks of the pipeline.
        micro_batches: number in a step; in the last two schedules they go in rounds of equal size.
        each: stages of a rank in the last two schedules; the stages go round the ranks.

    Example:
        >>> [[f"{action.letter}{action.number}" for action in actions] for actions in actions_of("1f1b", 2, 2)]
        [['F0', 'F1', 'B0', 'B1'], ['F0', 'B0', 'F1', 'B1']]
    """
    schedule = schedule.lower()
    if schedule in ("1f1b", "gpipe"):
        alternates = schedule == "1f1b" and micro_batches >= ranks
        ahead = [ranks - rank if alternates else micro_batches for rank in range(ranks)]
        return [list(_actions_of_stage(rank, micro_batches, ahead[rank])) for rank in range(ranks)]
    from torch.distributed.pipelining import schedules

    # torch computes the table of all ranks from the numbers of one rank's stages
    numbers = {"group_size": ranks, "group_rank": 0, "num_stages": each * ranks}
    stages: list[Any] = [SimpleNamespace(**numbers, submod=None) for _ in range(each)]
    kinds = {"interleaved": schedules.ScheduleInterleaved1F1B, "zero-bubble": schedules.ScheduleInterleavedZeroBubble}
    # adding messages to a table of many ranks takes seconds, and they are not needed here
    kind = type("Table", (kinds[schedule],), {"_prepare_schedule_with_comms": lambda self, table: None})
    table = kind(stages, micro_batches).pipeline_order
    there = [[action for action in table[rank] if action is not None] for rank in range(ranks)]
    return [[Action(t.stage_index, t.microbatch_index or 0, t.computation_type.value) for t in mine] for mine in there]


def _actions_of_stage(stage: int, micro_batches: int, ahead: int) -> Iterator[Action]:
    """Yield the actions of a stage that runs ``ahead`` forwards before its first backward."""
    for number in range(min(ahead, micro_batches)):
        yield Action(stage, number, "F")
    for number in range(micro_batches):
        yield Action(stage, number, "B")
        if ahead + number < micro_batches:
            yield Action(stage, ahead + number, "F")


def most_in_flight(actions: Sequence[Action]) -> dict[int, float]:
    """Return a dict from each stage to the largest number of micro-batches whose activations exist at once.

    Example:
        >>> [most_in_flight(actions) for actions in actions_of("1f1b", 2, 4)]
        [{0: 2.0}, {1: 1.0}]
    """
    # between the two parts of a backward, gradients are held in addition to the activations
    change = {"F": 1.0, "B": -1.0, "I": BETWEEN, "W": -1.0 - BETWEEN}
    now: dict[int, float] = {}
    most: dict[int, float] = {}
    for action in actions:
        now[action.stage] = now.get(action.stage, 0.0) + change[action.letter]
        most[action.stage] = max(now[action.stage], most.get(action.stage, 0))
    return most


def in_one_row(actions: Sequence[Sequence[Action]]) -> list[Action]:
    """Merge the actions of all ranks into one sequence for a process that runs all stages.

    Actions are ordered by their simulated start, so each follows the actions that it needs.

    Args:
        actions: actions of each rank; all stages are assumed to take equal times.

    Example:
        >>> [f"{each.stage}{each.letter}{each.number}" for each in in_one_row(actions_of("1f1b", 2, 2))]
        ['0F0', '0F1', '1F0', '1B0', '1F1', '0B0', '1B1', '0B1']
    """
    stages = 1 + max(action.stage for mine in actions for action in mine)
    return [each.action for each in sorted(simulate([1.0] * stages, actions), key=lambda each: each.begin)]


def simulate(seconds: Sequence[float], actions: Sequence[Sequence[Action]]) -> list[TimedAction]:
    """Simulate a schedule, and return each action with its start and end.

    A forward takes a third of a micro-batch's seconds.

    Args:
        seconds: seconds of a micro-batch's forward and backward on each stage.
        actions: actions of each rank.

    Raises:
        ValueError: the schedule is a deadlock.

    Example:
        >>> max(each.end for each in simulate([3.0, 3.0], actions_of("gpipe", 2, 2)))
        9.0
    """
    last = len(seconds) - 1
    ended: dict[Action | None, float] = {None: 0.0}
    free, found = [0.0] * len(actions), list[TimedAction]()
    waiting = [deque(mine) for mine in actions]
    while any(waiting):
        before = len(found)
        for row, mine in enumerate(waiting):
            while mine and _needs(mine[0], last) in ended:
                action = mine.popleft()
                begin = max(free[row], ended[_needs(action, last)])
                free[row] = begin + seconds[action.stage] * SHARES[action.letter]
                # the previous stage's backward needs the gradient of the input only
                ended[action._replace(letter="B") if action.letter == "I" else action] = free[row]
                found.append(TimedAction(row, action, begin, free[row]))
        if len(found) == before:
            raise ValueError("the schedule deadlocks: the next action of each rank waits for an action of another rank")
    return found


def _needs(action: Action, last: int) -> Action | None:
    """Return the action that must end before ``action`` starts, or None. ``last`` is the last stage's number."""
    stage, number, letter = action
    if letter == "F":
        return Action(stage - 1, number, "F") if stage else None
    if letter == "W":
        return Action(stage, number, "B")
    return Action(stage, number, "F") if stage == last else Action(stage + 1, number, "B")
