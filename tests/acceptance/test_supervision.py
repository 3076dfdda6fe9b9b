"""Ranks that wait in groups of their own, ranks that take other layers, strangers at the ports of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.sessions import Watched, disturb, marked

SCRIPT = Path(__file__).with_name("groups.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc"),
]


def test_healthy_ranks_that_wait_in_different_groups_go_on(tmp_path: Path) -> None:
    """Each waits at another line, and nobody is lost: who is busy is named, and that is all."""
    run = Watched(SCRIPT, tmp_path, "groups")
    busy = marked(SCRIPT, r"busy\b")
    assert run.says("rank 1 is in its own code", busy, "; rank 0 waits in all_reduce", "; rank 2 waits in barrier") >= 3
    assert run.code == 0, "\n".join(run.lines)
    assert sorted(line for line in run.lines if line.startswith("ended")) == ["ended 0", "ended 1", "ended 2"]


def test_both_ranks_are_named_where_one_has_skipped_a_sharded_layer(tmp_path: Path) -> None:
    """Gloo ends a process where sizes differ, and both ranks are at the same line."""
    run = Watched(SCRIPT, tmp_path, "layers")
    layer = marked(SCRIPT, r"layer\b")
    run.says("calls do not match: rank 0", "float32 (15,)", layer, "; rank 1", "float32 (20,)", layer)
    assert run.code not in (0, None)


@pytest.mark.parametrize("what", ["groups", "layers"])
def test_strangers_end_nothing(tmp_path: Path, what: str) -> None:
    run = Watched(SCRIPT, tmp_path, what, meets=disturb)
    if what == "groups":
        assert run.code == 0, "\n".join(run.lines)
    else:
        run.says("calls do not match: rank 0", "; rank 1")
