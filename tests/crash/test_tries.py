"""Kills at random: where they fall, and a few of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.tools.crash import live
from tests.tools.crash_training import DATA, EVERY, STRATEGIES, Setting, seen
from tests.tools.crash_tries import draw


def test_kills_fall_everywhere() -> None:
    """They fell mostly before the first checkpoint."""
    tries = [draw(1, number, tuple(STRATEGIES), DATA) for number in range(len(STRATEGIES) * len(DATA))]
    assert {(setting.strategy, setting.data) for setting, _ in tries} == {(s, d) for s in STRATEGIES for d in DATA}
    kills = [(setting, kill) for setting, deaths in tries for kill in deaths]
    late = sum(kill.step > EVERY for _, kill in kills)
    assert 0.75 * len(kills) <= late < len(kills)
    assert {kill.moment for _, kill in kills} == {"batch", "validation", "save", "write", "rename", "teardown"}
    assert {kill.step * 3 // (setting.steps + 1) for setting, kill in kills} == {0, 1, 2}
    assert draw(1, 5, tuple(STRATEGIES), DATA) == tries[5]


def test_a_setting_is_told_by_its_words() -> None:
    setting = Setting("ddp", "batch", 2, 2)
    assert Setting.parse(str(setting)) == setting


def test_a_later_lifes_word_counts_of_the_samples_seen(tmp_path: Path) -> None:
    (tmp_path / "seen-0").write_text("\n0 0 4,5.\n0 1 1.\n0 2 7,\n0 1 2,3.\n1 0 9.")
    assert seen(tmp_path, 1) == {0: [2, 3, 4, 5], 1: [9]}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_at_random_in_its_settings_no_run_is_lost(strategy: str) -> None:
    command = [sys.executable, "-m", "tests.tools.crash_tries", "--kills", "9", "--strategy", strategy]
    done = live(command, timeout=600)
    assert done.code == 0, done.output
    assert "; 0 of " in done.output.splitlines()[-1]
