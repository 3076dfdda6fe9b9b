"""Profiles of models that nobody has: a transformer of any size, in numbers only."""

from __future__ import annotations

from lockstep.extensions.balancing.planner.profile import (
    BlockProfile,
    ModelProfile,
    ParameterProfile,
    SpanProfile,
    StepProfile,
)
from lockstep.extensions.balancing.planner.trace import BACKWARD, FORWARD, REST, UPDATE, OperationWork

GB = 10**9


def transformer(billions: float, *, kept: float = 4 * GB, samples: int = 32, blocks: int = 24) -> ModelProfile:
    """A chain of equal blocks under Adam in float32.

    Args:
        billions: of parameters.
        kept: bytes that the forward keeps for the backward.
        samples: of a device's batch.
        blocks: their number.
    """
    each = int(billions * 1e9 / (blocks + 1))
    rows = 1024
    shape = (rows, each // rows)
    owners = [*range(blocks), REST]
    parameters = [ParameterProfile(f"p{at}", shape, 4, True, at, 8, 4, blocks - at) for at in owners]
    size, a = 4 * shape[0] * shape[1], int(kept / blocks)
    work = 2.0 * samples * 512 * shape[0] * shape[1]

    def steps(again: bool) -> StepProfile:
        own = a // 16 if again else a  # a recomputed block keeps its input
        here = [(at + 1) * own + a for at in range(blocks)]
        spans = [SpanProfile(FORWARD, at, here[at], here[at], 0, OperationWork(work, a, 20)) for at in range(blocks)]
        for at in reversed(range(blocks)):
            done = OperationWork((3 if again else 2) * work, 2 * a, 40)
            spans.append(SpanProfile(BACKWARD, at, here[at], here[at] + (blocks - at) * size, here[at] + size, done))
        total = (blocks + 1) * size
        done = OperationWork(0, 5 * total, 300)
        return StepProfile((*spans, SpanProfile(UPDATE, REST, 2 * size, total + 2 * size, 0, done)))

    chain = tuple(BlockProfile(f"blocks.{at}", "Block", True, a, a // 16) for at in range(blocks))
    return ModelProfile(
        "Made", samples, "32-true", tuple(parameters), 0, 0, chain, {"kept": steps(False), "recomputed": steps(True)}
    )
