"""torch's own tests of DistributedDataParallel pass with lockstep's in its place, all but those that are listed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.extensions.parallel.peers import record, suite, table
from tests.extensions.parallel.peers.runner import run
from tests.tools.pool import RankPool

pytest.importorskip("expecttest", reason="torch's test files need it")
RECORD = record.recorded()
TESTS: dict[str, dict[str, str]] = RECORD["tests"]
SAME_TORCH = torch.__version__.partition("+")[0] == RECORD["torch"]
other_torch = pytest.mark.skipif(not SAME_TORCH, reason=f"the table is of torch {RECORD['torch']}")

EVERYDAY = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_ddp_create_graph",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_hook_pickling_powerSGD",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_ddp_namedtuple",
    "test_ddp_static_graph_nested_types",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_broadcast_buffer",
    "test_ddp_sync_module_states",
    "test_ddp_inference",
    "test_verify_model_across_rank_without_logger",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own: torch's test files change settings of the process that imports them."""
    with RankPool(2, ("torch.testing._internal.common_distributed", "lockstep.engines.ddp.container")) as pool:
        yield pool


def test_the_page_is_written_from_the_record() -> None:
    assert table.PAGE.read_text() == table.page(), "run `python -m tests.extensions.parallel.peers.table`"


def test_what_ours_does_not_pass_has_a_reason_and_only_that() -> None:
    failing = {test: row for test, row in TESTS.items() if {row["torch"], row["lockstep"]} != {"passes"}}
    assert set(failing) == set(record.reasons())
    for test, said in record.reasons().items():
        row = TESTS[test]
        assert ("torch" in said) == (row["torch"] != "passes"), test
        assert ("ours" in said or "own words" in said) == (row["lockstep"] != "passes"), test
        assert row.get("own words", "passes") == "passes", test
        assert row["over TCP"] == row["lockstep"], test
        assert (said.get("kind") in table.KINDS) == (row["torch"] == "passes"), test


def test_ours_passes_what_torchs_passes_but_for_a_few() -> None:
    theirs = [test for test, row in TESTS.items() if row["torch"] == "passes"]
    ours = [test for test in theirs if "passes" in (TESTS[test]["lockstep"], TESTS[test].get("own words"))]
    assert len(theirs) >= 105
    assert len(theirs) - len(ours) <= 30


@other_torch
@pytest.mark.slow
def test_the_record_has_all_tests_of_the_files(pool: RankPool) -> None:
    without = {"test_DistributedSampler_padding", "test_backward_no_ddp"}  # make none
    names = set(record.names(pool))
    assert names - without == set(TESTS)
    assert set(suite.RPC_TESTS) <= names


@other_torch
@pytest.mark.parametrize("test", EVERYDAY)
def test_everyday(pool: RankPool, test: str) -> None:
    end = run(pool, test, "lockstep")
    assert end.word == "passes", f"{end.reason}\n{end.detail}"


@other_torch
@pytest.mark.parametrize(("fault", "said"), [("averages nothing", "not close"), ("leaves", "rank 1 leaves")])
def test_a_planted_fault_is_found(pool: RankPool, fault: str, said: str) -> None:
    end = run(pool, "test_accumulate_gradients_no_sync", fault)
    assert end.word == "fails"
    assert said in end.reason


@other_torch
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("test", "name"),
    [(test, name) for test, row in TESTS.items() for name in row],
    ids=lambda word: word.replace(" ", "-"),
)
def test_as_recorded(pool: RankPool, test: str, name: str) -> None:
    end = run(pool, test, name)
    assert end.word == TESTS[test][name], f"{end.reason}\n{end.detail}"
