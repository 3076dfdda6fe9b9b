"""What every test gets: the rank pool, a guard against leaks, a time limit."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
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
# Whether there are GPUs is asked without touching CUDA: copies of a process that has touched it could not use it.
BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
had_by_nvml = BY_NVML in os.environ
os.environ.setdefault(BY_NVML, "1")
# Who is started in the background by a shell's script ignores Ctrl-C, and so would the fits that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until torch is imported: it would go through all that is there dozens of times

# scripts/test --device made-up: each process that imports torch, and each that those start, has the device.
DEVICE = os.environ.get("LOCKSTEP_TEST_ACCELERATOR", "cpu")
if DEVICE == "madeup":
    _tests = os.path.dirname(__file__)
    _folders = [os.path.join(_tests, "accelerator", "autoload"), os.path.dirname(_tests)]
    sys.path[:0] = _folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*_folders, *filter(None, [os.environ.get("PYTHONPATH")])])

from collections import Counter  # noqa: E402
from collections.abc import Generator, Iterator  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from lockstep.ground import seed  # noqa: E402
from lockstep.ground.extensions import EXTENSIONS, is_there  # noqa: E402
from lockstep.ground.rank import LIGHTNINGS, forget_warnings, rank_zero_only  # noqa: E402
from tests.accelerator.left_out import why_not  # noqa: E402
from tests.copies import NURSERY, Copies, Files, by_file  # noqa: E402
from tests.load import busy  # noqa: E402
from tests.tools import leaks  # noqa: E402
from tests.tools.pool import RankPool, pool_processes  # noqa: E402

gc.enable()
SECONDS_SLOW = 900
"""The time limit of a test marked slow that sets none; pyproject has that of the others, and some files theirs."""

PRELOAD = [
    "lockstep.trainer",
    "lockstep.engines.ddp.strategy",
    *(["lockstep.extensions.balancing.pipeline.strategy"] if is_there("balancing") else []),
    "lockstep.engines.sharded.fsdp",
    "pytest",
    "torch.distributed.pipelining",
    *(["torchmetrics"] if find_spec("torchmetrics") else []),
]
"""What the nursery of ranks imports beside torch; that of copies also what some tests need (tests/preloaded.py)."""

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
    "tests/extensions/search/test_local.py",
    "tests/ground/test_installed.py",
    "tests/extensions/balancing/planner/test_memory.py",
    "tests/gpu/test_parts.py",
)
"""Files of few tests that take long. They come early: the last file of a run has to be a short one."""

has_device = DEVICE != "cpu" or torch.cuda.is_available()
seed_torch = torch.manual_seed if has_device else torch.default_generator.manual_seed
"""Without a device, the former notes the whole stack three times, for the seeds of devices to come."""

# A drawn example may take as long as the machine lets it: a test that fails once in a hundred runs tells nothing.
settings.register_profile("patient", parent=settings(), deadline=None, max_examples=40)
settings.load_profile("patient")

POOL = pytest.StashKey[RankPool]()
"""Of the process that shares out the tests: copies of its nursery fork the ranks."""

_failed = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    for item in items:
        own = {mark.name for mark in item.own_markers}
        limited = item.get_closest_marker("timeout") if "slow" not in own else "timeout" in own
        if item.get_closest_marker("slow") and not limited:
            item.add_marker(pytest.mark.timeout(SECONDS_SLOW))
        if absent := absent_extensions(item):
            item.add_marker(pytest.mark.skip(reason=f"needs the extension {absent[0]}"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if reason := why_not(item.nodeid, getattr(item, "fixturenames", []), DEVICE):
            item.add_marker(pytest.mark.skip(reason=reason))


def absent_extensions(item: pytest.Item) -> list[str]:
    """The extensions that a test is marked to need and whose folders are not there."""
    needed = [name for mark in item.iter_markers("extension") for name in mark.args]
    unknown = set(needed) - EXTENSIONS.keys()
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: no extension is called {', '.join(sorted(unknown))}")
    return [name for name in needed if not is_there(name)]


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Marks as slow all cases of a test but those that ``everyday`` lets run every day."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("everyday") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        kept = of_every_day(alike, *alike[0].get_closest_marker("everyday").args)
        for item in alike:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def of_every_day(alike: list[pytest.Item], count: int = 0) -> list[pytest.Item]:
    """So many cases, spread over the list, that have many values of each parameter, each about equally often.

    Without a count as few as have each value of each parameter.
    """
    most = min(count or len(alike), len(alike))
    values = {item: {(name, repr(value)) for name, value in item.callspec.params.items()} for item in alike}  # type: ignore[attr-defined]
    spread = {round(number * (len(alike) - 1) / max(1, most - 1)) for number in range(most)}
    left = [alike[place] for place in sorted(range(len(alike)), key=lambda place: place not in spread)]
    kept: list[pytest.Item] = []
    uses: Counter[tuple[str, str]] = Counter()

    def gain(item: pytest.Item) -> tuple[int, int]:
        """The values that none has yet; then how seldom the others have its values."""
        own = [uses[value] for value in values[item]]
        return own.count(0), -sum(own)

    while len(kept) < most:
        item = max(left, key=gain)
        if not count and not gain(item)[0]:
            break
        left.remove(item)
        kept.append(item)
        uses.update(values[item])
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is made now stays: no collection of garbage needs to walk torch, pytest and 7,000 tests, now or later."""
    gc.disable()
    try:
        found = yield
        if session.config.option.copies:
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)  # imports torch's compiler
        return found
    finally:
        gc.freeze()
        gc.enable()
        if not had_by_nvml:
            os.environ.pop(BY_NVML, None)


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


def cost(tests: list[pytest.Item]) -> float:
    """About how long a file takes: a test on ranks takes ten times as long as another."""
    return sum(1.0 if "ranks" in getattr(test, "fixturenames", ()) else 0.1 for test in tests)


def in_order(files: Files) -> Files:
    """The files in the order in which they begin: the dearest first, as the last ones have to be short.

    Every second one is of `LONG`: all at once they would start more processes than there are processors.
    """
    first = {test.nodeid.partition("::")[0]: tests for tests in files for test in tests}
    long = [first[path] for path in LONG if path in first]
    others = sorted((tests for tests in files if tests not in long), key=cost, reverse=True)
    pairs = [both for pair in zip(long, others, strict=False) for both in pair]
    return pairs + long[len(others) :] + others[len(long) :]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--copies", type=int, default=0, metavar="N", help="run the tests on N copies of this process")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Where copies will need ranks, their nursery imports while the other tests are collected."""
    option, stash = item.config.option, item.config.stash
    if option.copies and not option.collectonly and POOL not in stash and "ranks" in getattr(item, "fixturenames", ()):
        value = os.environ.pop(BY_NVML)
        more = [] if DEVICE == "cuda" else ["tests.preloaded"]  # of which some touch CUDA, and then no rank can
        stash[POOL] = RankPool(0, [*PRELOAD, *more])
        os.environ[BY_NVML] = value


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.option.copies
    if not number or session.testsfailed or session.config.option.collectonly:
        return None
    pool = session.config.stash.get(POOL, None)
    with nullcontext() if pool is None else pool:
        Copies(session, number, in_order(by_file(session.items)), pool).run()
    return True


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The session's rank pool: ``ranks(2).run(fn, *args)`` gives ``[fn(*args) on rank 0, ... on rank 1]``."""
    nursery = request.config.stash.get(NURSERY, None)
    with RankPool(2, () if nursery else PRELOAD, nursery) as pool:
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
    rank_zero_only.rank = 0  # an environment that an earlier test has made may have set it
    for name in ("lockstep", *LIGHTNINGS):  # where a test has made Lightning quiet, lockstep says nothing, either
        logging.getLogger(name).setLevel(logging.INFO)
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
    # what takes a moment to go takes that much longer
    left = leaks.leaks(before, pool_processes(), patience=0.2 if failed else 2.0 * busy())
    if left:
        leaks.put_back(before, pool_processes())
        if not failed:
            pytest.fail("the test left something behind:\n  " + "\n  ".join(left), pytrace=False)
