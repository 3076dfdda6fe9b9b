"""The crash harness itself: what it tells apart, what it clears away, what it says."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from tests.tools import leaks
from tests.tools.crash import Kill, digest, live, survive


def script(code: str) -> list[str]:
    """A command that runs ``code`` (which imports no torch, so it is quick)."""
    return [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]


SAY = "print('digest of weights: ' + '{}' * 64)\n"
DIE = "if '--kill' in sys.argv: os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize(
    "kill",
    [Kill(), Kill(rank=2, step=9, worker=1), Kill(step=7, moment="rename"), Kill(rank=1, moment="save", delay=0.01)],
)
def test_a_kill_is_told_to_the_script_by_an_argument(kill: Kill) -> None:
    assert Kill.parse(str(kill)) == kill


def test_a_digest_sees_every_bit_and_neither_order_nor_layout() -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": [1, (2.0, None)]}
    same = {"b": [1, (2.0, None)], "a": torch.arange(6.0).view(2, 3).t().contiguous().t()}
    assert digest(state) == digest(same)
    flipped = state["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [
        {**state, "a": flipped},
        {**state, "a": state["a"].view(3, 2)},
        {**state, "a": state["a"].view(torch.int32)},
        {**state, "a": state["a"] * -0.0 + state["a"], "b": [1, (2.0, 0)]},
        {"a": state["a"]},
        {**state, "b": [1, 2.0, None]},
    ]
    assert len({digest(state), *map(digest, others)}) == 7
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def test_a_run_that_ends_with_other_bits_is_found_out() -> None:
    whole = live(script(SAY.format("a")))
    kills = [Kill(step=3), Kill(moment="write")]
    lives = survive(script(DIE + SAY.format("a")), kills, whole)
    assert [life.code for life in lives] == [-9, -9, 0]
    with pytest.raises(AssertionError, match=r"other bits in weights after \[.*step=3.*moment=write"):
        survive(script(DIE + SAY.format("b")), kills, whole)
    with pytest.raises(AssertionError, match="did not die of rank=0,step=3"):
        survive(script(SAY.format("a")), kills, whole)
    with pytest.raises(AssertionError, match="did not die of rank=0,worker=1,step=3"):
        survive(script(SAY.format("a")), [Kill(worker=1, step=3)], whole)
    with pytest.raises(AssertionError, match=r"the resumed run failed \(3\)(.|\n)*no checkpoint"):
        survive(script(DIE + "print('no checkpoint'); sys.exit(3)"), kills, whole)
    with pytest.raises(AssertionError, match="has reported nothing"):
        survive(script(DIE), kills, live(script("")))


def test_a_killed_worker_that_had_nothing_left_to_do_is_missed_by_nobody() -> None:
    """It had handed out the last batch of its epoch: the run went on, and the test said that it had not died."""
    struck = "print('\\nstruck in epoch 1, step 14', flush=True)\n"
    kills, whole = [Kill(worker=1, step=9), Kill(step=20)], live(script(SAY.format("a")))
    (only,) = survive(script(struck + SAY.format("a")), kills, whole)
    assert only.code == 0
    with pytest.raises(AssertionError, match="other bits in weights"):
        survive(script(struck + SAY.format("b")), kills, whole)


def test_a_run_that_hangs_tells_where_and_is_ended_with_all_its_processes() -> None:
    begun = time.monotonic()
    stand = "def stand_still(): time.sleep(60)\nprint('here it stands', flush=True)\n"
    # two dumps at once on one stderr run into each other: the child makes none
    hang = stand + "import faulthandler\nif not os.fork(): os.setpgid(0, 0); faulthandler.disable()\nstand_still()"
    with pytest.raises(TimeoutError, match=r"did not end in time(.|\n)*here it stands(.|\n)*in stand_still"):
        live(script(hang), timeout=1)
    assert time.monotonic() - begun < 10


def test_a_rank_that_outlives_its_run_is_named_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tools.crash.SECONDS_TO_FOLLOW", 0.5)
    with pytest.raises(TimeoutError, match=r"(?s)its first process ended, and \d+ \(.*\) did not"):
        live(script("if not os.fork(): time.sleep(60)"))


def test_what_a_life_leaves_in_shared_memory_is_removed_and_its_files_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    code = f"open('/dev/shm/crash_%d_0' % os.getpid(), 'w'); open({str(kept)!r}, 'w')\n{DIE}"
    before = leaks.shared_memory_files()
    assert live(script(code), Kill()).code == -9
    assert not [name for name in leaks.shared_memory_files() - before if name.startswith("crash_")]
    assert kept.exists()
