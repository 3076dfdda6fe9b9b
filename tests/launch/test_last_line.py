"""The last line is one line of lockstep's own, whatever a message says; and a screen has at most 40 lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.supervise.causes import Cause, also_failed, cause_of, is_printed, judgement
from lockstep.supervise.screen_text import MOST, REASON, one_line, printable, reason_of
from tests.scripts.in_rank import run_script
from tests.tools.fresh import PYTHONPATH, python
from tests.tools.pool import RankPool

ON_PATH = {"PYTHONPATH": PYTHONPATH}

FORGED = "it broke\nlockstep: rank 7 failed first, at other.py:1: ValueError: not me"
HOSTILE = [
    pytest.param(FORGED, id="forged"),
    pytest.param("\x1b[2K\x1b[1A\rlockstep: rank 7 failed first\r", id="terminal"),
    pytest.param("a\0b\x85c\u2028d\u202ee\udcff", id="unprintable"),
    pytest.param(
        "Error(s) in loading state_dict:\n" + "\n".join(f"\tsize mismatch for {i}" for i in range(99)), id="long"
    ),
    pytest.param("x" * 6_000_000, id="6 MB"),
]


@pytest.mark.parametrize("message", HOSTILE)
def test_whatever_a_message_says_the_last_line_names_the_rank_that_failed(message: str) -> None:
    cause = cause_of(1, RuntimeError(message))
    text = judgement(cause, False, False, [1]).text
    assert max(map(len, text.split("\n"))) < 1100
    assert text.count("\n") < 40
    last = text.split("\n")[-1]
    assert last.startswith("lockstep: rank 1 failed first, at ")
    assert "RuntimeError: " in last
    assert last.isprintable()
    assert len(last) < REASON + 200
    assert all(each.isprintable() for each in text.replace("\n", "").replace("\t", ""))


def test_a_reason_is_one_line() -> None:
    assert reason_of(ValueError("first\nsecond")) == "ValueError: first\\nsecond"
    assert one_line("äß 漢 e") == "äß 漢 e"
    assert one_line("a" * 400 + "b" * 400, 300) == "a" * 200 + " ... (800 characters) ... " + "b" * 100
    assert printable("two\n\tlines\x1b[0m") == "two\n\tlines\\x1b[0m"
    with pytest.raises(SyntaxError) as caught:
        compile("1 +", "made.py", "exec")
    assert reason_of(caught.value) == "SyntaxError: invalid syntax"


def test_a_long_reason_keeps_its_advice() -> None:
    """The last line of a full disk lost what to do about it."""
    error = OSError(28, f"could not write '/{'folder/' * 60}last.ckpt': there is no room: make room, or choose another")
    assert reason_of(error).endswith("there is no room: make room, or choose another")


SCRIPT = """
import sys
from tests.loop.pieces import Slope, numbers, quiet

class Module(Slope):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise ValueError("no")
        return super().training_step(batch, batch_idx)

def broken(*args):
    raise OSError("the hook")

sys.excepthook = broken
quiet(devices=2, max_epochs=1).fit(Module(), numbers(16, 2))
"""


def test_the_last_line_of_a_script_whose_excepthook_is_broken(ranks: RankPool, tmp_path: Path) -> None:
    """Everything was printed twice."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (ended,) = run_script(ranks, script, folder=tmp_path, environ=ON_PATH)
    lines = ended.stderr.rstrip("\n").split("\n")
    assert lines[-1] == f"lockstep: rank 1 failed first, at {script}:8: ValueError: no"
    assert len(lines) <= 40
    assert ended.returncode == 1


def _note(rank: int, reason: str = "ValueError: no", location: str = "train.py:7", lost: bool = False) -> Cause:
    return Cause(rank, float(rank), reason, location, "\n".join("traceback" for _ in range(MOST)), lost=lost)


def test_ranks_that_failed_alike_are_told_in_one_line() -> None:
    """Eight ranks that failed alike printed eight tracebacks."""
    notes = [_note(rank) for rank in range(8)]
    assert also_failed(notes[0], notes) == ["ranks 1-7 failed in the same way"]
    assert also_failed(notes[2], notes[1:4], "alpha") == ["ranks 1, 3 on alpha failed in the same way"]
    assert is_printed(notes[0], [5], notes)
    assert not is_printed(notes[0], [5])
    assert also_failed(notes[0], [_note(1, lost=True)]) == []


FAILS_ALIKE = """
import os, resource, signal, sys
import torch
from torch.utils.data import DataLoader
from tests.loop.pieces import Slope, quiet

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 17 and sys.argv[1] == "worker":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core among the files of the checkout
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.zeros(1)

class Module(Slope):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and sys.argv[1] == "chain":
            fail(60)
        return super().training_step(batch, batch_idx)

def fail(left):
    try:
        raise KeyError(left)
    except KeyError:
        if left:
            fail(left - 1)
        raise

loader = DataLoader(Numbers(), batch_size=2, num_workers=2 * (sys.argv[1] == "worker"))
quiet(devices=int(sys.argv[2]), strategy=sys.argv[3], max_epochs=1).fit(Module(), loader)
"""


@pytest.mark.parametrize(
    ("what", "devices", "strategy"),
    [
        ("worker", 1, "auto"),  # on a rank of the pool
        # every day by parts: chains and ranks that failed alike, above
        pytest.param("chain", 3, "ddp", marks=pytest.mark.slow),
        pytest.param("chain", 2, "ddp_spawn", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_told_in_40_lines(ranks: RankPool, tmp_path: Path, what: str, devices: int, strategy: str) -> None:
    """A loader's worker that crashed had 88 lines printed on one process, and N ranks printed N tracebacks."""
    script = tmp_path / "train.py"
    script.write_text(FAILS_ALIKE)
    words = [what, str(devices), strategy]
    if devices == 1 and strategy == "auto":
        (ended,) = run_script(ranks, script, *words, folder=tmp_path, environ=ON_PATH)
    else:
        ended = python(script, *words, folder=tmp_path, seconds=120, **ON_PATH)
    lines = [line for line in ended.stderr.rstrip("\n").split("\n") if not line.startswith("memory of rank 0")]
    assert ended.returncode == 1
    assert len(lines) <= 40
    assert ("KeyError: 0" if what == "chain" else "DataLoader worker") in lines[-1]
    if devices > 2:
        assert len(lines) <= MOST + 2
        assert any("failed in the same way" in line for line in lines)


GATHERS = """
import torch
from tests.loop.pieces import Slope, numbers, quiet

class Module(Slope):
    def validation_step(self, batch, batch_idx):
        self.log("value", batch.mean())
    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            self.all_gather(torch.zeros(1000))

quiet(devices=2, max_epochs=1, strategy="ddp", num_sanity_val_steps=0).fit(Module(), numbers(16, 2), numbers(16, 2))
"""


def test_ranks_that_gather_other_sizes_are_named(ranks: RankPool, tmp_path: Path) -> None:
    """gloo aborts a rank then, and the last line was "killed by SIGABRT"."""
    script = tmp_path / "train.py"
    # the aborted rank must not leave a core file in the checkout
    script.write_text(f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)){GATHERS}")
    (ended,) = run_script(ranks, script, folder=tmp_path, environ=ON_PATH)
    lines = ended.stderr.rstrip("\n").split("\n")
    assert lines[-1].startswith("lockstep: the ranks' calls do not match: "), ended.stderr
    assert f"{script}:10" in lines[-1]
    assert "all_gather" in lines[-1]
    assert len(lines) <= 40
