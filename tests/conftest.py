"""What every test gets: the rank pool, a guard against leaks, a time limit."""

from __future__ import annotations

import gc
import os
import random
import sys

# Before torch is imported: tests run on one thread each, as the ranks of the pool do.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
# torch asks for the name of each address that a store connects to: an answer that is lost shall cost one second, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# Processes that tests start find lockstep compiled: where none is kept, each of them compiles it for most of a second.
# So does pytest itself: without what it has kept, each of its workers rewrites the asserts of 320 files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until torch is imported: it would go through all that is there dozens of times

# scripts/test --device made-up: each process that imports torch, and each that those start, has the device.
DEVICE = os.environ.get("LOCKSTEP_TEST_ACCELERATOR", "cpu")
if DEVICE == "madeup":
    _tests = os.path.dirname(__file__)
    _folders = [os.path.join(_tests, "accelerator", "autoload"), os.path.dirname(_tests)]
    sys.path[:0] = _folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*_folders, *filter(None, [os.environ.get("PYTHONPATH")])])

from collections import OrderedDict  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from lockstep.ground import seed  # noqa: E402
from lockstep.ground.rank import forget_warnings  # noqa: E402
from lockstep.testing import leaks  # noqa: E402
from lockstep.testing.pool import RankPool, pool_processes  # noqa: E402
from tests.accelerator.left_out import why_not  # noqa: E402

gc.enable()
SECONDS_SLOW = 900
"""The time limit of a test marked slow that sets none; pyproject has that of the others, and some files theirs."""

PRELOAD = (
    "lockstep.trainer",
    "lockstep.engines.ddp.strategy",
    "lockstep.engines.sharded.fsdp",
    "lockstep.engines.pipeline.strategy",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torchmetrics",
)
"""What most ranks import in their lives, 1.5 s of a processor in each of them."""

LONG = (
    "tests/launch/test_notebook.py",
    "tests/surface/test_types.py",
    "tests/launch/test_misfortunes.py",
    "tests/accelerator/test_suite.py",
    "tests/project/test_bare.py",
    "tests/launch/test_last_line.py",
    "tests/launch/test_spawn.py",
    "tests/launch/test_script.py",
    "tests/launch/test_fork.py",
    "tests/hpc/test_local.py",
    "tests/ground/test_installed.py",
    "tests/planner/test_memory.py",
    "tests/gpu/test_parts.py",
)
"""Files of few tests that take long. They come early: the last file of a run has to be a short one."""

seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
"""Without a device, the former notes the whole stack three times, for the seeds of devices to come."""

# A drawn example may take as long as the machine lets it: a test that fails once in a hundred runs tells nothing.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")

_failed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        own = {mark.name for mark in item.own_markers}
        limited = item.get_closest_marker("timeout") if "slow" not in own else "timeout" in own
        if item.get_closest_marker("slow") and not limited:
            item.add_marker(pytest.mark.timeout(SECONDS_SLOW))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if reason := why_not(item.nodeid, getattr(item, "fixturenames", []), DEVICE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is made now stays: no collection of garbage needs to walk torch, pytest and 7,000 tests, now or later."""
    gc.disable()
    try:
        found = yield
        if "PYTEST_XDIST_WORKER" in os.environ:
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # imports torch's compiler
        return found
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """What a file of tests leaves in memory stays out of the collections of garbage that follow.

    Tests import packages of a hundred thousand objects each: after a few hundred files a collection took a second, and
    many tests collect.
    """
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, as ``--dist loadfile`` does; tests/slurm on one worker: a machine has one such cluster."""
    from xdist.scheduler import LoadFileScheduling

    class LongFirst(OrderedDict[str, dict[str, bool]]):
        """The files that wait for a worker; the scheduler takes the first, and has put in those of most tests first.

        Every second one is long: all at once they would start more processes than there are processors.
        """

        def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
            first = next((file for file in LONG if file in self), None) if len(self) % 2 else None
            return super().popitem(last) if first is None else (first, self.pop(first))

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.workqueue = LongFirst()

        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's rank pool: ``ranks(2).run(fn, *args)`` gives ``[fn(*args) on rank 0, ... on rank 1]``."""
    preload = [name for name in PRELOAD if find_spec(name.partition(".")[0])]
    with RankPool(2, preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def lightning() -> Any:
    """``lightning.pytorch``; the test is skipped where it is not installed."""
    before = os.environ.copy()
    library = pytest.importorskip("lightning.pytorch")
    for name in set(os.environ) - set(before):  # its import sets variables
        del os.environ[name]
    return library


@pytest.fixture(autouse=True)
def begins_alike() -> Iterator[None]:
    """Each test draws the same numbers, whatever ran before it: weights, and the order of samples. What is said once in
    a process is said anew."""
    before, seed._current = seed._current, None
    forget_warnings()
    random.seed(0)
    numpy.random.seed(0)
    seed_torch(0)
    yield
    seed._current = before


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, thread, port, file in /dev/shm, variable, setting or group behind.

    A test that failed for a reason of its own is not told twice; what it left is cleared away all the same.
    """
    before = leaks.snapshot(pool_processes())
    yield
    failed = request.node.stash.get(_failed, False)
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # what takes a moment to go takes that much longer
    left = leaks.leaks(before, pool_processes(), patience=0.2 if failed else 2.0 * busy)
    if left:
        leaks.put_back(before, pool_processes())
        if not failed:
            pytest.fail("the test left something behind:\n  " + "\n  ".join(left), pytrace=False)
