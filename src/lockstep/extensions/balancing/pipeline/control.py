"""Decisions about the split of a pipeline's blocks into stages: predicted times, the best split, and when to change it.

All functions are pure: the same numbers give the same split on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median

from lockstep.extensions.balancing.planner.partition import Block, Device, DoesNotFit, partition
from lockstep.extensions.balancing.shares import LARGE, SMALL, Votes

PAYS_WITHIN = 200
"""Windows within which a move of blocks must save the time that it takes."""
UNKNOWN_LINK = 1e9
"""Assumed bytes a second between ranks, until blocks have moved once."""
SET_UP = 0.1
"""Seconds of a move in addition to those of its messages."""
SIMILAR = 1.5
"""Blocks of one kind whose times differ by less than this factor are treated as equal."""


@dataclass(frozen=True)
class BlockCost:
    """A block's fraction of the time of the whole chain of blocks, and the block's memory.

    Attributes:
        share: fraction of the seconds of the whole chain.
        moves: bytes that move to another rank with the block: parameters, optimizer states, buffers.
        stays: bytes that the block takes on its rank during a step: ``moves`` and the gradients.
        keeps: bytes that its forward of a micro-batch keeps for the backward.
    """

    share: float
    moves: float = 0.0
    stays: float = 0.0
    keeps: float = 0.0


@dataclass(frozen=True)
class StageCost:
    """Seconds that a stage's rank takes for a micro-batch, and the memory that the rank has for the stage.

    Attributes:
        chain: seconds of a forward and backward of all blocks of the chain.
        outside: seconds outside the blocks: the step before the chain, or after it.
        memory: bytes that the rank has for the blocks of the stage.
        in_flight: number of micro-batches whose activations the rank stores at the same time.
        place: the rank's position in the pipeline; None: each stage has its own rank, in the order of the measurements.
    """

    chain: float
    outside: float = 0.0
    memory: float = math.inf
    in_flight: float = 1
    place: int | None = None


@dataclass(frozen=True)
class StageLook:
    """Measured seconds of a micro-batch on a rank, inside and outside the rank's blocks, excluding waits."""

    blocks: float
    outside: float = 0.0


@dataclass(frozen=True)
class Resplit:
    """A change of the number of blocks in each stage, or the decision to change nothing.

    Attributes:
        before: number of blocks by stage before the change.
        after: number of blocks by stage after the change.
        seconds: measured seconds of a micro-batch on each stage before the change.
        predicted: predicted seconds of a micro-batch on each stage after the change.
        reason: reason for the decision, in words.
        step: number of optimizer steps before the change.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    seconds: tuple[float, ...]
    predicted: tuple[float, ...]
    reason: str
    step: int = 0

    @property
    def gain(self) -> float:
        """Predicted speedup of the slowest stage: 2.0 is twice as fast."""
        return max(self.seconds) / max(self.predicted)

    def __str__(self) -> str:
        """Describe the change in one line for the log."""
        after, before = (", ".join(map(str, counts)) for counts in (self.after, self.before))
        took, takes = (", ".join(f"{s * 1e3:.3g}" for s in seconds) for seconds in (self.seconds, self.predicted))
        if self.before == self.after:
            return f"stages keep {after} blocks ({self.reason}): {took} ms of a micro-batch"
        return (
            f"stages take {after} blocks in place of {before} ({self.reason}). A micro-batch should take them {takes} "
            f"ms in place of {took}: the slowest is {self.gain:.2f} x as fast"
        )


def shares_of_blocks(seconds: Sequence[Sequence[float]], kinds: Sequence[str]) -> list[float]:
    """Return each block's fraction of the chain's seconds, from the measurements of several ranks.

    Args:
        seconds: seconds of each block, by rank.
        kinds: kinds of the blocks; see `SIMILAR`.

    Example:
        >>> shares_of_blocks([[1.0, 3.0], [2.0, 6.0]], ["a", "b"])
        [0.25, 0.75]
    """
    parts = [[each / sum(of_rank) for each in of_rank] for of_rank in seconds]
    found = [median(of_block) for of_block in zip(*parts, strict=True)]
    # blocks of one class differ by noise mostly: without this, equal blocks would not be split evenly
    for kind in set(kinds):
        members = [block for block, other in enumerate(kinds) if other == kind]
        typical = median(found[block] for block in members)
        for block in members:
            if typical / SIMILAR < found[block] < typical * SIMILAR:
                found[block] = typical
    total = sum(found)
    return [each / total for each in found]


@dataclass
class SplitControl:
    """Controller that decides, from successive measurements, when the split of blocks into stages changes.

    A measurement is the seconds of a micro-batch on each rank, without waiting. The speed of a rank follows from the
    newest one, and the share of each block from the measurement of all blocks at the start. A change that saves at
    least `LARGE` of a window is made at once, and one that saves at least `SMALL` when several measurements in a row
    favor it (`Votes`). A move that takes longer than it saves within `PAYS_WITHIN` windows is not made.

    Args:
        blocks: costs of the chain's blocks.
        stages: costs of the stages on their ranks.
        counts: present number of blocks of each stage.

    Attributes:
        warning: the reason why memory is ignored; "" if it is not.
        link: bytes a second at which blocks move.

    Example:
        >>> control = SplitControl([BlockCost(0.25, 8)] * 4, [StageCost(0.4), StageCost(1.2)], (2, 2))
        >>> control.first("measured", micro_batches=4).after
        (3, 1)
    """

    blocks: Sequence[BlockCost]
    stages: Sequence[StageCost]
    counts: tuple[int, ...]
    warning: str = ""
    link: float = UNKNOWN_LINK
    _votes: Votes = field(default_factory=Votes)
    _expected: tuple[float, ...] = ()
    _settled: tuple[float, ...] = ()  # seconds of each stage at which no other split was better

    def __post_init__(self) -> None:
        self.adopt(self.counts)

    @property
    def is_undecided(self) -> bool:
        """True if the newest measurement favors a different split, but further measurements must confirm it."""
        return not self._settled

    def adopt(self, counts: tuple[int, ...]) -> None:
        """Set the current split, and discard predictions for the previous split."""
        self.counts, self._expected, self._settled = counts, self.predict(counts), ()

    def predict(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the predicted seconds of a micro-batch on each stage, with ``counts`` blocks in the stages."""
        ends = list(accumulate(counts, initial=0))
        return tuple(
            stage.outside + stage.chain * sum(block.share for block in self.blocks[start:stop])
            for stage, (start, stop) in zip(self.stages, pairwise(ends), strict=True)
        )

    def best(self) -> tuple[int, ...]:
        """Return the split that makes the slowest stage as fast as possible within each rank's memory."""
        chain = [Block(b.share, states=b.stays, kept=b.keeps, working=b.keeps) for b in self.blocks]
        # only the first and the last stage run code outside the blocks: it counts as part of their first and last block
        first, last = self.stages[0], self.stages[-1]
        chain[0] = replace(chain[0], seconds=chain[0].seconds + first.outside / first.chain)
        chain[-1] = replace(chain[-1], seconds=chain[-1].seconds + last.outside / last.chain)
        row = [Device(1.0 / stage.chain, stage.memory, in_flight=stage.in_flight) for stage in self.stages]
        try:
            found = partition(chain, row, spare=False)
        except DoesNotFit as error:
            # measured bytes are an estimate: the run is not stopped by it
            self.warning = str(error)
            found = partition(chain, [replace(device, memory=math.inf) for device in row], spare=False)
        return tuple(stage.stop - stage.start for stage in found.stages)

    def first(self, reason: str, micro_batches: int) -> Resplit:
        """Choose a split from the first measurement of the blocks, adopt the split, and return the decision."""
        now, after = self.predict(self.counts), self.best()
        then = self.predict(after)
        # a measurement of one moment must show a large gain; smaller ones follow from measured windows
        if max(then) > (1 - LARGE) * max(now) or not self._pays(max(now) - max(then), after, micro_batches):
            after, then = self.counts, now
        found = Resplit(self.counts, after, now, then, reason)
        self.adopt(after)
        return found

    def look(self, looks: Sequence[StageLook], micro_batches: int) -> Resplit | None:
        """Evaluate a measurement, and return the change of the split that is due, or None.

        Args:
            looks: seconds of a micro-batch on each rank of a pipeline.
            micro_batches: number of micro-batches in an accumulation window.
        """
        # the clock is too coarse for such stages, or a device has not finished a window
        if any(not look.blocks > 0 or not math.isfinite(look.blocks + look.outside) for look in looks):
            return None
        self._update_speeds(looks)
        now = self.predict(self.counts)
        # the search takes milliseconds: it is skipped while times stay the same
        if self._settled and all(abs(a - b) <= SMALL * b for a, b in zip(now, self._settled, strict=True)):
            return None
        after = self.best()
        then = self.predict(after)
        saved = 1 - max(then) / max(now) if after != self.counts else 0.0
        self._settled = now if saved < SMALL else ()
        giver = max(range(len(now)), key=lambda stage: (self.counts[stage] - after[stage], -stage))
        if not self._votes.are_enough(saved, giver):
            return None
        if not self._pays(max(now) - max(then), after, micro_batches):
            self._settled = now
            return None
        self._votes.reset()
        found = Resplit(self.counts, after, now, then, self._reason(now))
        self.adopt(after)
        return found

    def _update_speeds(self, looks: Sequence[StageLook]) -> None:
        """Update the ranks' speeds from measured seconds. A rank's seconds are the total over all its stages."""
        ends = list(accumulate(self.counts, initial=0))
        shares = [sum(block.share for block in self.blocks[start:stop]) for start, stop in pairwise(ends)]
        places = [at if stage.place is None else stage.place for at, stage in enumerate(self.stages)]
        of_rank = [
            sum(share for share, at in zip(shares, places, strict=True) if at == place) for place in range(len(looks))
        ]
        last = len(self.stages) - 1
        self.stages = [
            replace(
                stage,
                chain=looks[place].blocks / of_rank[place],
                # code before the chain runs with the first stage, and code after it with the last one
                outside=looks[place].outside if at in (0, last) else 0.0,
            )
            for at, (stage, place) in enumerate(zip(self.stages, places, strict=True))
        ]

    def _reason(self, now: Sequence[float]) -> str:
        slowest = max(range(len(now)), key=now.__getitem__)
        took, expected = now[slowest], self._expected[slowest]
        if took <= expected:
            return f"stage {slowest} is the slowest"
        return f"stage {slowest} takes {took * 1e3:.3g} ms of a micro-batch, {took / expected:.2f} x what was predicted"

    def _pays(self, saved: float, after: Sequence[int], micro_batches: int) -> bool:
        return SET_UP + self.moved_between(self.counts, after) / self.link <= PAYS_WITHIN * saved * micro_batches

    def moved_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return the bytes that move to other ranks when the split changes."""
        stages = [[stage for stage, count in enumerate(counts) for _ in range(count)] for counts in (before, after)]
        return sum(block.moves for block, one, other in zip(self.blocks, *stages, strict=True) if one != other)

    def record_move(self, size: float, seconds: float) -> None:
        """Estimate the speed of the link from the bytes and seconds of a move of blocks."""
        if size > 0 and seconds > 0:
            self.link = size / seconds
