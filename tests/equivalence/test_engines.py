"""Every way of data parallel training against one process, in float64, by parameter; what each step sends."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lockstep import LightningModule
from lockstep.engines.ddp.bucket import ALIGNMENT
from lockstep.strategies import DDPStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import CASES as COMMON
from tests.equivalence.models import Case, Idle, Normed, Plain, Sometimes, rows
from tests.tools.hooked import hooked
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(60)

ENGINES: dict[str, dict[str, Any]] = {
    "over TCP": {"shared_memory": False},
    "in shared memory": {},
    "static graph": {"static_graph": True, "shared_memory": False},
    "static graph in shared memory": {"static_graph": True},
    "without views": {"gradient_as_bucket_view": False},
    "many buckets": {"bucket_cap_mb": 1e-4},
    "sharded optimizer": {"shard_optimizer": True},
    **hooked("communication hook", "local steps to come"),
}
# Of 26 samples in micro-batches of 2, two are left for all ranks.
CASES: dict[str, Case] = {
    **COMMON,
    "SyncBatchNorm": (Normed, 23, {"sync_batchnorm": True}),
    "SyncBatchNorm, empty shares": (Normed, 26, {"sync_batchnorm": True, "batch_size": 2}),
}
CHANGING = ("unused in some steps",)
"""Cases whose graph is not the same in every step."""


def goes(engine: str, case: str) -> bool:
    return not (ENGINES[engine].get("static_graph") and case in CHANGING)


ALL = [
    (engine, case, world)
    for engine, case, world in itertools.product(ENGINES, CASES, (1, 2, 3, 4))
    if goes(engine, case)
]


@pytest.mark.everyday(12)
@pytest.mark.parametrize(("engine", "case", "world"), ALL)
def test_ranks_are_one_process(ranks: RankPool, engine: str, case: str, world: int) -> None:
    make, length, given = CASES[case]

    def check() -> EquivalenceReport:
        strategy = DDPStrategy(**ENGINES[engine])
        return check_equivalence(make, rows(length), strategy=strategy, devices=world, **given)

    first, *others = ranks(world).run(check, group=False, timeout=50)
    assert first, first
    assert all(report == first for report in others)


@pytest.mark.parametrize(("case", "worlds"), [("empty shares", (2, 3, 4)), ("SyncBatchNorm, empty shares", (3, 4))])
def test_some_ranks_have_no_sample_where_the_case_says_so(case: str, worlds: tuple[int, ...]) -> None:
    """Of 13 samples only three ranks left some without, and every day four ran."""
    _, length, given = CASES[case]
    for world in worlds:
        batches, left = divmod(length, given["batch_size"] * world)
        assert 0 < left < world
        assert batches < given.get("steps", 5)


def who_uses_the_rare_layer(world: int) -> list[bool]:
    """Whether this rank does, step by step, in the case "unused in some steps"."""
    make, length, given = CASES["unused in some steps"]
    used: list[bool] = []

    class Tells(make):  # type: ignore[valid-type, misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.world_size == world:
                used.append(bool(self.chosen(batch[0]).any()))
            return super().training_step(batch, batch_idx)

    strategy = DDPStrategy(**ENGINES["over TCP"])
    report = check_equivalence(Tells, rows(length), strategy=strategy, devices=world, **given)
    assert report, report
    return used


def test_the_rare_layer_is_used_by_no_rank_by_some_and_by_all(ranks: RankPool) -> None:
    """No sample used it: the case, and all that was made of it, tried a layer that is never used."""
    used = ranks(2).run(who_uses_the_rare_layer, 2, group=False, timeout=50)
    assert {sum(step) for step in zip(*used, strict=True)} == {0, 1, 2}
    used = ranks(3).run(who_uses_the_rare_layer, 3, group=False, timeout=50)
    assert {sum(step) for step in zip(*used, strict=True)} == {0, 1, 2}


# -- what a step sends

TENSORS = len(list(Plain().parameters()))


def sent(
    engine: dict[str, Any], case: tuple[type[LightningModule], int, dict[str, Any]], world: int
) -> tuple[EquivalenceReport, list[int]]:
    """The report, and the all-reduces that torch saw; the latter hold the agreements of ranks, too."""
    make, length, given = case
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        report = check_equivalence(make, rows(length), strategy=DDPStrategy(**engine), devices=world, **given)
    return report, calls


def padded(module: LightningModule, itemsize: int = 8) -> int:
    """Bytes of the gradients, each of which begins at a multiple of `ALIGNMENT`."""
    return sum(-(-parameter.numel() * itemsize // ALIGNMENT) * ALIGNMENT for parameter in module.parameters())


@pytest.mark.parametrize("case", ["even", "accumulation 3, clipped"])
def test_a_step_sends_each_gradient_once(ranks: RankPool, case: str) -> None:
    """One bucket, with a mark for each parameter at its end; accumulation sends as much as a step without."""
    for report, calls in ranks(2).run(sent, ENGINES["over TCP"], CASES[case], 2, group=False, timeout=50):
        assert report, report
        size = padded(Plain()) + 8 * TENSORS
        assert report.traffic == ((1, size),) * report.steps
        assert calls.count(size) == report.steps


class TwoBackwards(Plain):
    """Two halves of a batch, one backward each; only the second one is to be reduced if ``at_once``."""

    automatic_optimization = False
    at_once = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses = self.losses(batch[0])
        with optimizer.toggle_model(sync_grad=not self.at_once):
            self.manual_backward(losses[: len(losses) // 2].sum() / len(losses), retain_graph=True)
        self.manual_backward(losses[len(losses) // 2 :].sum() / len(losses))
        optimizer.step()


class Separately(TwoBackwards):
    at_once = False


@pytest.mark.parametrize(("make", "rounds"), [(TwoBackwards, 1), (Separately, 2)])
def test_a_backward_without_sync_sends_nothing(ranks: RankPool, make: type[LightningModule], rounds: int) -> None:
    def check() -> tuple[EquivalenceReport, list[int]]:
        return sent(ENGINES["over TCP"], (make, 72, {}), 2)

    for report, calls in ranks(2).run(check, group=False, timeout=50):
        assert report, report
        size = padded(Plain()) + 8 * TENSORS
        assert report.traffic == ((rounds, rounds * size),) * report.steps
        assert calls.count(size) == rounds * report.steps


def test_unused_parameters_cost_no_message(ranks: RankPool) -> None:
    """Their marks ride in the bucket, and so do zeros in their places."""
    for report, calls in ranks(3).run(
        sent, ENGINES["over TCP"], CASES["unused in some steps"], 3, group=False, timeout=50
    ):
        assert report, report
        size = padded(Sometimes()) + 8 * len(list(Sometimes().parameters()))
        assert report.traffic == ((1, size),) * report.steps
        assert calls.count(size) == report.steps


def test_a_static_graph_sends_no_marks(ranks: RankPool) -> None:
    """Those of the first round, which is recorded, travel by themselves; later there are none."""
    for report, calls in ranks(2).run(sent, ENGINES["static graph"], CASES["never used"], 2, group=False, timeout=50):
        assert report, report
        size = padded(Idle())
        assert report.traffic[0] == (2, size + 1 + len(list(Idle().parameters())))
        assert report.traffic[1:] == ((1, size),) * (report.steps - 1)
        assert calls.count(size) == report.steps


def test_in_shared_memory_no_gradient_goes_through_the_group(ranks: RankPool) -> None:
    for report, calls in ranks(2).run(sent, ENGINES["in shared memory"], CASES["even"], 2, group=False, timeout=50):
        assert report, report
        size = padded(Plain()) + 8 * TENSORS
        assert report.traffic == ((1, size),) * report.steps
        assert size not in calls
