"""torch's tests of DistributedDataParallel (two files in its wheel), run in the ranks of a pool.

The files are imported as they are, in the ranks only: they read their settings from the environment and change torch's.
Their decorators that skip tests where there is no GPU, or on torch's own machines, are taken off while they are
imported.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import unittest
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

FILE = "torch.testing._internal.distributed.distributed_test"
RPC_FILE = "torch.testing._internal.distributed.ddp_under_dist_autograd_test"
RPC_CASES = ("DdpUnderDistAutogradTest", "DdpComparisonTest", "CudaDdpComparisonTest")
RPC_TESTS = {
    "test_backward_ddp_inside": 6,
    "test_backward_ddp_outside": 6,
    "test_backward_ddp_outside_uneven_inputs": 6,
    "test_backward_no_ddp": 6,
    "test_ddp_comparison": 4,
    "test_ddp_comparison_uneven_inputs": 4,
    "test_ddp_dist_autograd_local_vs_remote": 4,
    "test_ddp_dist_autograd_local_vs_remote_gpu": 4,
    "test_ddp_dist_autograd_sparse_grads": 4,
}
"""Tests of that file, whose processes call each other, and how many each wants. They make their groups themselves."""
CANDIDATES = {
    "torch": "torch's DistributedDataParallel",
    "lockstep": "lockstep's, whose gradients go through shared memory",
    "over TCP": "lockstep's, with shared_memory=False",
    "own words": "lockstep's, where the text of errors and torch's log of errors do not count",
}
SMALLER = {"test_ddp_uneven_inputs": {1000: 60}}
"""Numbers in a test (the side of its images), and what stands for them on a CPU."""

_TOUCHES = re.compile(r"\bDistributedDataParallel\b|_test_DDP_helper")
_CALLS = re.compile(r"\bself\.(_\w+)\(")


def _always(*reasons: Any, **others: Any) -> Callable[[Any], Any]:
    """In the place of a decorator that may skip."""
    return lambda test: test


def imported(world: int, path: str = FILE) -> ModuleType:
    """A file, for a group of ``world`` ranks."""
    sys.modules[path] = file = _import(world, path)  # what is saved in a test is looked up here
    return file


@cache
def _import(world: int, path: str) -> ModuleType:
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(world), INIT_METHOD="file://unused")
    from torch.testing._internal import common_distributed, common_utils

    skips = {
        common_distributed: (
            "skip_if_lt_x_gpu",
            "nccl_skip_if_lt_x_gpu",
            "require_n_gpus_for_nccl_backend",
            "skip_but_pass_in_sandcastle",
            "skip_but_pass_in_sandcastle_if",
            "requires_nccl",
        ),
        common_utils: ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"),
        unittest: ("skip", "skipIf", "skipUnless"),
    }
    with contextlib.ExitStack() as stack:
        for module, names in skips.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _always))
        stack.enter_context(mock.patch.object(common_distributed, "skip_if_no_gpu", lambda test: test))
        sys.modules.pop(path, None)
        return importlib.import_module(path)


def names() -> list[str]:
    """The tests that make a DistributedDataParallel, themselves or in a method that they call."""
    base = imported(2).DistributedTest._DistTestBase
    found = [name for name in _in_order(base) if _touches(base, name, set())]
    return found + [name for case in RPC_CASES for name in _in_order(getattr(imported(2, RPC_FILE), case))]


def _in_order(base: type) -> list[str]:
    def line(name: str) -> int:
        return int(inspect.unwrap(getattr(base, name)).__code__.co_firstlineno)

    return sorted((name for name in dir(base) if name.startswith("test_")), key=lambda name: (line(name), name))


def _touches(base: type, name: str, seen: set[str]) -> bool:
    seen.add(name)
    if not hasattr(base, name):
        return False
    try:
        text = inspect.getsource(inspect.unwrap(getattr(base, name)))
    except (OSError, TypeError):
        return False
    return bool(_TOUCHES.search(text)) or any(
        _touches(base, called, seen) for called in _CALLS.findall(text) if called not in seen
    )


def candidate(name: str) -> type:
    """The class of one of `CANDIDATES`."""
    if name == "torch":
        from torch.nn.parallel.distributed import DistributedDataParallel as theirs

        return theirs
    from lockstep import DistributedDataParallel as ours

    if name in ("averages nothing", "leaves"):
        return _planted(ours, name)
    return ours


def _planted(ours: type, fault: str) -> type:
    """Ours with a fault that the tests have to find."""
    import torch.distributed as dist

    class Faulty(ours):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if fault == "leaves" and dist.get_rank() == 1:
                raise RuntimeError("rank 1 leaves")
            super().__init__(*args, **kwargs)
            self.reducer.detach()

    return Faulty


def trial(test: str, name: str) -> tuple[int, str]:
    """Runs a test on this rank with the class ``name``: how many of it were made, and why it was skipped if it was.

    Raises:
        Exception: what the test raises.
    """
    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed

    from tests.extensions.parallel.peers.mapping import mapped

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with_rpc = test in RPC_TESTS
    file = imported(world, RPC_FILE if with_rpc else FILE)
    case = _case_with_rpc(file, test) if with_rpc else _case(file, test)
    case.rank = rank
    case.file_name = os.path.join(os.environ["TEMP_DIR"], "store")
    if name == "own words":
        case.assertRaisesRegex = lambda kind, text, *args, **kwargs: case.assertRaises(kind, *args, **kwargs)  # noqa: PT027
        file.verify_ddp_error_logged = lambda model, text: None  # type: ignore[attr-defined]
    set_rng_seed()
    _shrink(inspect.unwrap(getattr(type(case), test)), SMALLER.get(test, {}))
    try:
        with mapped(file, candidate(name), shared_memory=False if name == "over TCP" else None) as made:
            getattr(case, test)()
            if dist.is_initialized() and not with_rpc:
                dist.barrier()
    except unittest.SkipTest as skip:
        return 0, str(skip)
    except SystemExit as exit:
        reasons = {skip.exit_code: skip.message for skip in _test_skips().values()}
        if exit.code not in reasons:
            raise
        return 0, reasons[exit.code]
    return len(made), ""


def _shrink(test: Any, numbers: dict[int, int]) -> None:
    constants = tuple(numbers.get(one, one) if type(one) is int else one for one in test.__code__.co_consts)
    test.__code__ = test.__code__.replace(co_consts=constants)


def _test_skips() -> dict[str, Any]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return TEST_SKIPS


def _case(file: ModuleType, test: str) -> Any:
    """The test case of this rank, made as the file's own runner makes it in its processes."""
    import torch.distributed as dist

    class Case(file.TestDistBackend, file.DistributedTest._DistTestBase):  # type: ignore[name-defined]
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            if args or kwargs or not dist.is_initialized():
                super()._barrier(*args, **kwargs)
            else:
                dist.barrier()

    return Case(test)


def _case_with_rpc(file: ModuleType, test: str) -> Any:
    """The same for a test that makes its group, and an RPC agent, itself."""
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    base = next(getattr(file, case) for case in RPC_CASES if hasattr(getattr(file, case), test))
    return type("Case", (TensorPipeRpcAgentTestFixture, base, TestCase), {})(test)
