"""What can be wrong in the benchmark of failures without anybody noticing: screens, verdicts, what is left; and that
a healthy training is not taken for a hang."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.misfortune import memory, remains, report, scenarios, verdict
from benchmarks.misfortune.screen import Piece, shown, since
from benchmarks.misfortune.watched import Seen

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LAST = "lockstep: rank 1 failed first, at /home/me/train.py:81: KeyError: 'no such label'"


def seen(*lines: str, gone: float = 101.0, codes: Sequence[int] = (1,), ended: bool = True) -> Seen:
    """A run of one command with an event at 100 s, whose lines came a tenth of a second later."""
    pieces = [Piece(99.0, "Epoch 0\r\n"), Piece(100.1, "".join(f"{line}\r\n" for line in lines))]
    return Seen(100.0, gone, [pieces], list(codes), ended, [])


# -- screens


def test_a_screen_shows_what_was_written_last() -> None:
    text = "a\r\n\r\n\x1b[31mEpoch 0: 10%\rEpoch 0: 99%\x1b[0m\r\nlonger line\rshort\nlast"
    assert shown(text) == ["a", "Epoch 0: 99%", "shortr line", "last"]
    assert shown("bar\r   \r\nend\n") == ["end"]


def test_lines_count_from_the_event() -> None:
    pieces = [Piece(1.0, "summary\nmore\n"), Piece(2.0, "Trace"), Piece(2.1, "back\nerror\n")]
    assert since(pieces, 2.0) == ["Traceback", "error"]


# -- verdicts


def test_ranks_are_told_with_their_own_lines() -> None:
    line = "rank 1 waits in all_reduce #417, /a/b/train.py:88 (training_step); ranks 0, 2 are in barrier (save.py:31)"
    assert list(verdict.places(line)) == [(1, "train.py:88"), (0, "save.py:31"), (2, "save.py:31")]
    assert list(verdict.places("train.py:88: rank 1 failed")) == []
    assert list(verdict.places("rank 1 waits in broadcast #27 with rank 0, train.py:94")) == [(1, "train.py:94")]


def test_a_failure_is_kept_only_with_all_that_is_promised() -> None:
    good = verdict.of_failure(seen("Traceback", LAST), 1, "train.py:81", "")
    assert (good.missed, good.kept, good.lines, good.code) == ([], True, 2, 1)
    assert good.seconds == pytest.approx(1.0)
    for missed, run in {
        "3.5 s": seen(LAST, gone=103.5),
        "41 lines": seen(*["frame"] * 40, LAST),
        "the last line": seen(LAST, "and a word more"),
        "exit code 0": seen(LAST, codes=(1, 0)),
        "it did not end by itself": seen(LAST, ended=False),
    }.items():
        assert verdict.of_failure(run, 1, "train.py:81", "").missed == [missed]
    assert verdict.of_failure(seen(LAST), 0, "train.py:81", "").missed == ["the last line"]  # another rank
    assert verdict.of_failure(seen(LAST), 1, "train.py:8", "").missed == ["the last line"]  # another line


def test_every_screen_has_to_end_with_the_cause() -> None:
    one = seen(LAST)
    two = Seen(one.event, one.gone, [*one.screens, [Piece(100.2, "lockstep: lost the others\n")]], [1, 1], True, [])
    found = verdict.of_failure(two, 1, "train.py:81", "")
    assert (found.missed, found.last) == (["the last line"], "lockstep: lost the others")


def test_a_process_that_ended_without_a_word_is_told_with_how_it_ended() -> None:
    run = seen("lockstep: rank 1 (process 71) was killed by SIGKILL (exit code -9)")
    assert verdict.of_failure(run, 1, "", "SIGKILL").kept
    assert not verdict.of_failure(run, 1, "", "SIGSTOP|stopped").told
    assert not verdict.of_failure(run, 0, "", "SIGKILL").told


def test_what_did_not_happen_is_not_kept() -> None:
    run = Seen(None, 5.0, [[Piece(1.0, LAST)]], [1], True, [])
    assert verdict.of_failure(run, 1, "train.py:81", "").missed == ["it did not come to the failure"]
    hang = verdict.of_hang(run, {1: "train.py:81"})
    assert hang.missed(3.0, is_busy=False, is_harmless=False)


def test_torchruns_report_comes_after_ours() -> None:
    report_of_torchrun = ["W1122 04:16:35.4 27 api.py:1] Sending SIGTERM", "Traceback (most", "  File x", "=" * 60]
    assert verdict.own_last([LAST, *report_of_torchrun]) == LAST
    assert verdict.own_last(["something", LAST]) == LAST
    assert verdict.of_failure(seen(LAST, *report_of_torchrun), 1, "train.py:81", "", by_torchrun=True).told


def test_a_hang_is_named_when_all_its_ranks_are() -> None:
    wanted = {0: "train.py:31", 1: "train.py:88"}
    half, whole = "rank 0 in barrier (train.py:31)", "rank 0 in barrier (train.py:31); rank 1 in wait (train.py:88)"
    pieces = [Piece(100.5, f"{half}\n"), Piece(103.0, whole[:40]), Piece(104.5, f"{whole[40:]}\n")]
    found = verdict.of_hang(Seen(100.0, 105.0, [pieces], [1], True, []), wanted)
    assert (found.seconds, found.ended, found.line, found.missing) == (4.5, 5.0, whole, {})
    assert found.missed(3.0, is_busy=False, is_harmless=False) == []
    assert found.missed(2.0, is_busy=False, is_harmless=False) == ["4.5 s"]
    assert found.missed(3.0, is_busy=True, is_harmless=False) == ["it was ended"]
    partly = verdict.of_hang(Seen(100.0, 105.0, [pieces[:1]], [0], True, []), wanted)
    assert partly.seconds is None
    assert partly.missed(3.0, False, False) == ["rank 1 at train.py:88 is not named", "exit code 0"]
    assert partly.missed(3.0, False, is_harmless=True) == []


def test_a_busy_rank_may_be_named_and_nothing_else_said_of_healthy_ranks() -> None:
    busy = "lockstep: for 3 s, rank 1 is in its own code, train.py:7; rank 0 waits in all_reduce #3, train.py:9"
    done = "healthy: 9 steps, 4 waits of 3 s"
    found = verdict.of_health(seen(busy, "rank 1:", done, codes=(0,)), 60.0)
    assert (found.missed, found.busy, found.did) == ([], 1, "9 steps, 4 waits of 3 s")
    wrong = "lockstep: the ranks' calls do not match: rank 1 called barrier #3"
    assert verdict.of_health(seen(busy, wrong, done, codes=(0,)), 60.0).missed == [wrong]
    assert verdict.of_health(seen(busy), 60.0).missed == ["it did not come to its end"]


# -- what is started


def test_there_are_twelve_of_each_and_their_lines_are_marked() -> None:
    assert (len(scenarios.FAILURES), len(scenarios.HANGS)) == (12, 12)
    rows = [*scenarios.FAILURES, *scenarios.ELSEWHERE, *scenarios.HANGS]
    assert len({row.key for row in rows}) == len(rows)
    raising = [row for row in scenarios.FAILURES if not row.says]
    for row in raising:
        name, line = row.place.split(":")
        assert "raise " in (scenarios.SCRIPTS / name).read_text().splitlines()[int(line) - 1], row
    for hang in scenarios.HANGS:
        assert hang.is_harmless or set(hang.places) <= {0, 1}
    with pytest.raises(ValueError, match="marks 0 lines"):
        scenarios.marked("fails.py", "nowhere")


def test_a_node_is_a_command_and_torchrun_starts_the_script() -> None:
    first, second = scenarios.of_failure(scenarios.FAILURES[-1])
    assert (first.environ["NODE_RANK"], second.environ["NODE_RANK"]) == ("0", "1")
    assert first.environ["MASTER_PORT"] == second.environ["MASTER_PORT"]
    (torchrun,) = scenarios.of_hang(next(hang for hang in scenarios.HANGS if hang.start == scenarios.TORCHRUN), 3)
    assert torchrun.words[1:3] == ["-m", "torch.distributed.run"]
    assert not any(word == sys.executable for word in torchrun.words[1:])


# -- what is left


def test_a_family_is_of_all_generations() -> None:
    assert remains.family({2: 1, 3: 2, 4: 3, 9: 8, 5: 1}, 1) == [2, 3, 4, 5]
    assert remains.family({}, 1) == []


def test_listening_sockets_are_read_from_the_kernels_table() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    listens = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0\n"
    is_connected = listens.replace(" 0A ", " 01 ").replace("4711", "4712")
    assert remains.sockets(head + listens + is_connected) == {remains.Port(8080, 4711)}


def test_control_groups_of_both_versions_are_read() -> None:
    assert memory.groups("5:cpu,memory:/jobs/7\n1:name=systemd:/\n0::/\n") == {
        "cpu": "/jobs/7",
        "memory": "/jobs/7",
        "name=systemd": "/",
        "": "/",
    }


# -- the page


def test_a_row_is_kept_only_if_all_its_runs_are() -> None:
    assert report.kept([[], []]) == "yes"
    assert report.kept([["3.4 s"], [], ["3.4 s", "a|b"]]) == "**no** in 2 of 3: 3.4 s; a\\|b"
    assert report.spread([1.0, 3.0, 2.0]) == "2.0 (3.0)"
    assert report.spread([1.0, None]) == "–"
    assert report.cell("at /home/me/train.py:81: `x|y`") == "`at train.py:81: x\\|y`"
    assert len(report.cell("x" * 500)) == report.WIDTH + 2


def test_the_page_has_twelve_rows_of_each() -> None:
    good = verdict.of_failure(seen(LAST), 1, "train.py:81", "").__dict__
    hang = verdict.of_hang(seen(LAST), {}).__dict__
    figures = {
        "failures": {"runs": {row.key: [good, good] for row in scenarios.FAILURES}, "memory": False},
        "hangs": {"runs": {row.key: [hang] for row in scenarios.HANGS}, "timeout": 3.0},
    }
    for name, found in figures.items():
        text = report.section(name, {"found": found, "load": [0.1, 0.2]})
        assert len(re.findall(r"^\| (?!failure|hang)", text, re.MULTILINE)) == 12
        assert ("killed itself" in text) == (name == "failures")


# -- a healthy run


@pytest.mark.parametrize(
    ("seconds", "timeout"),
    # Every day waits are played: tests/launch/test_hang_monitor.py, tests/testing/test_scale.py.
    [
        pytest.param(6, 1, marks=pytest.mark.slow),
        pytest.param(60, 3, marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
def test_a_healthy_training_is_not_taken_for_a_hang(seconds: int, timeout: int) -> None:
    """Ranks wait for one another again and again, for longer than ``hang_timeout``."""
    words = [sys.executable, str(BENCHMARKS / "misfortune" / "scripts" / "healthy.py")]
    words += ["--seconds", str(seconds), "--timeout", str(timeout)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=230)
    pieces = [Piece(0.0, run.stdout + run.stderr)]
    found = verdict.of_health(Seen(None, 0.0, [pieces], [run.returncode], True, []), seconds)
    assert not found.missed, run.stderr
    assert re.search(rf"\b{4 if seconds == 6 else 16} waits of", found.did)


LEAVES = """
import os, socket, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from misfortune.watched import Command, adopt, watched
child = '''
import os, socket, sys, time
from pathlib import Path
listener = socket.create_server(("127.0.0.1", 0))
Path("/dev/shm/misfortune-" + sys.argv[1]).touch()
time.sleep(0.7)
Path(os.environ["EVENT"]).write_text(str(time.monotonic()))
time.sleep(0.3)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print("done")
'''
adopt()
seen = watched([Command([sys.executable, "-c", child, str(os.getpid())])], 20.0)
os.unlink(f"/dev/shm/misfortune-{os.getpid()}")
print(seen.ended, seen.codes, round(seen.gone - seen.event), *seen.left)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes that outlive their parents are seen there")
def test_what_a_run_leaves_behind_is_seen_and_ended() -> None:
    """An orphan in a session of its own that holds the port, and a file in /dev/shm."""
    words = [sys.executable, "-c", LEAVES, str(BENCHMARKS)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.match(r"True \[0\] \d+ process \S*python\S* -c .* port \d+ /dev/shm/misfortune-\d+$", printed), printed
