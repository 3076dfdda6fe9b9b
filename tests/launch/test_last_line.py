"""The last line is one line of lockstep's own, whatever a message says; and a screen has at most 40 lines."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest

from lockstep.checkpoint.format import load
from lockstep.supervise import screen_text
from lockstep.supervise.causes import OTHERS, Cause, also_failed, cause_of, is_told, judgement, named
from lockstep.supervise.screen_text import MOST, MOST_ALONE, REASON, one_line, printable, reason_of, shortened
from scripts import draw_run
from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

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


def _chain(length: int) -> Exception:
    error: Exception = ValueError("0")
    for index in range(1, length):
        try:
            raise KeyError(index) from error
        except KeyError as raised:
            error = raised
    return error


def test_a_chain_of_60_exceptions_is_shortened() -> None:
    lines = shortened(_chain(60)).splitlines()
    assert len(lines) == MOST
    assert lines[0].startswith("ValueError: 0")
    assert lines[-1] == "KeyError: 59"


def test_frames_of_pythons_library_are_folded() -> None:
    """An error in a function that `json` calls showed the frames of `json`, and lost the user's."""

    def parse(depth: int) -> object:
        if not depth:
            raise ValueError("of the user")
        return json.loads("[1]", parse_int=lambda text: parse(depth - 1))

    with pytest.raises(ValueError, match="of the user") as caught:
        parse(4)
    text, short = "".join(traceback.format_exception(caught.value)), shortened(caught.value, 1000)
    assert text.count(f'File "{json.__file__}"') == 4
    assert "json" not in short.replace("json.loads(", "")
    assert short.count(f"... 3 calls in lockstep, torch and Python ({screen_text.WHOLE}=1 shows them)") == 4
    assert short.count(f'File "{__file__}"') == text.count(f'File "{__file__}"')


@pytest.mark.skipif(sys.version_info < (3, 11), reason="has no groups")
def test_a_group_of_exceptions_is_shortened() -> None:
    group = ExceptionGroup("many", [_chain(3) for _ in range(40)])  # noqa: F821
    assert len(shortened(group).splitlines()) <= MOST
    assert reason_of(group) == "ExceptionGroup: many (40 sub-exceptions)"


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
import lockstep

class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 1:
            {what}
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def broken(*args):
    raise OSError("the hook")

sys.excepthook = {hook}
loader = DataLoader(torch.zeros(16, 1), batch_size=2)
lockstep.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                 enable_progress_bar=False, enable_model_summary=False).fit(Module(), loader)
"""


@pytest.mark.parametrize(
    ("what", "hook", "says"),
    [
        # these messages without a script, every day: test_whatever_a_message_says_the_last_line_names_the_rank_...
        pytest.param(
            f"raise ValueError({FORGED!r})",
            "sys.excepthook",
            "ValueError: it broke\\nlockstep",
            id="forged",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raise ValueError('m' * 6_000_000)", "sys.excepthook", "ValueError: mmm", id="6 MB", marks=pytest.mark.slow
        ),
        pytest.param("raise ValueError('no')", "broken", "ValueError: no", id="hook"),
    ],
)
def test_the_last_line_of_a_script(ranks: RankPool, tmp_path: Path, what: str, hook: str, says: str) -> None:
    """A message of 6 MB ended the script with 137; a broken excepthook had everything printed twice."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(what=what, hook=hook))
    (ended,) = run_script(ranks, script, folder=tmp_path)
    lines = ended.stderr.rstrip("\n").split("\n")
    assert lines[-1].startswith(f"lockstep: rank 1 failed first, at {script}:13: {says}")
    assert len(lines) <= 40
    assert ended.returncode == 1


def _note(rank: int, reason: str = "ValueError: no", location: str = "train.py:7", lost: bool = False) -> Cause:
    return Cause(rank, float(rank), reason, location, "\n".join("traceback" for _ in range(MOST)), lost=lost)


def test_ranks_that_failed_alike_are_told_in_one_line() -> None:
    """Eight ranks that failed alike printed eight tracebacks."""
    notes = [_note(rank) for rank in range(8)]
    assert also_failed(notes[0], notes) == ["ranks 1-7 failed alike"]
    assert also_failed(notes[2], notes[1:4], "alpha") == ["ranks 1, 3 on alpha failed alike"]
    assert is_told(notes[0], [5], notes)
    assert not is_told(notes[0], [5])
    assert also_failed(notes[0], [_note(1, lost=True)]) == []


def test_what_ranks_say_in_different_ways_stays_below_40_lines() -> None:
    notes = [_note(rank, f"KeyError: {rank}") for rank in range(64)] + [_note(64, "KeyError: 3")]
    also = also_failed(notes[3], notes)
    assert also[0] == "rank 64 failed alike"
    assert also[1] == "rank 0 failed, too, at train.py:7: KeyError: 0"
    assert also[-1] == "ranks 2, 4-63 failed in other ways"
    assert len(also) == OTHERS + 2
    assert MOST + 1 + judgement(notes[3], False, False, [1], also=also).text.count("\n") + 1 <= 40


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 1, 2, 7], "ranks 0-2, 7")])
def test_neighbours_are_named_by_the_first_and_the_last(ranks: list[int], words: str) -> None:
    assert named(ranks) == words


FAILS_ALIKE = """
import os, resource, signal, sys
import torch
from torch.utils.data import DataLoader
import lockstep

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 17 and sys.argv[1] == "worker":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core among the files of the checkout
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.zeros(1)

class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and sys.argv[1] == "chain":
            fail(60)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fail(left):
    try:
        raise KeyError(left)
    except KeyError:
        if left:
            fail(left - 1)
        raise

loader = DataLoader(Numbers(), batch_size=2, num_workers=2 * (sys.argv[1] == "worker"))
lockstep.Trainer(accelerator="cpu", devices=int(sys.argv[2]), strategy=sys.argv[3], max_epochs=1, logger=False,
                 enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                 ).fit(Module(), loader)
"""


@pytest.mark.parametrize(
    ("what", "devices", "strategy"),
    [
        ("worker", 1, "auto"),  # on a rank of the pool
        # every day by parts: chains and ranks that failed alike, above
        pytest.param("chain", 3, "ddp", marks=pytest.mark.slow),
        pytest.param("chain", 1, "ddp", marks=pytest.mark.slow),
        pytest.param("worker", 2, "ddp", marks=pytest.mark.slow),
        pytest.param("chain", 2, "ddp_spawn", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_told_in_40_lines(ranks: RankPool, tmp_path: Path, what: str, devices: int, strategy: str) -> None:
    """A loader's worker that crashed had 88 lines printed on one process, and N ranks printed N tracebacks."""
    script = tmp_path / "train.py"
    script.write_text(FAILS_ALIKE)
    words = [what, str(devices), strategy]
    if devices == 1 and strategy == "auto":
        (ended,) = run_script(ranks, script, *words, folder=tmp_path)
    else:
        ended = python(script, *words, folder=tmp_path, seconds=120)
    lines = [line for line in ended.stderr.rstrip("\n").split("\n") if not line.startswith("memory of rank 0")]
    assert ended.returncode == 1
    assert len(lines) <= 40
    assert ("KeyError: 0" if what == "chain" else "DataLoader worker") in lines[-1]
    if devices > 2:
        assert len(lines) <= MOST + 2
        assert any("failed alike" in line for line in lines)


def test_on_one_process_only_what_came_out_of_lockstep_is_folded(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ALIKE + "fail(60)\n")  # after a fit: what folds is there
    (ended,) = run_script(ranks, script, "nothing", "1", "auto", folder=tmp_path)
    assert "KeyError: 60" in ended.stderr
    assert ended.stderr.count("\n") > MOST_ALONE


TUNES = """
import torch
from lockstep import LightningModule, Trainer
from lockstep.tuner import Tuner
class Net(LightningModule):
    lr = 0.1
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        raise KeyError("of the user")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
    def train_dataloader(self):
        return [torch.ones(1, 1)]
Tuner(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)).lr_find(Net())
"""


COMMANDS = """
import torch
from lockstep import LightningModule
from lockstep.cli import LightningCLI
class Net(LightningModule):
    def __init__(self, width: int = 1):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
LightningCLI(Net, args=["fit", "--trainer.min_epochs=5", "--trainer.max_epochs=1", "--trainer.logger=false"])
"""


@pytest.mark.parametrize(
    ("script", "end"),
    [
        pytest.param(TUNES, "KeyError: 'of the user'", marks=pytest.mark.extension("extras")),
        pytest.param(COMMANDS, "the least is above the most.", marks=pytest.mark.extension("lightning")),
    ],
)
def test_what_fails_in_a_search_or_a_command_line_is_folded(
    script: str, end: str, ranks: RankPool, tmp_path: Path
) -> None:
    """A long traceback stood in front of a good sentence."""
    (tmp_path / "fails.py").write_text(script)
    (done,) = run_script(ranks, tmp_path / "fails.py", folder=tmp_path)
    trace = done.stderr.partition("Traceback")[2]
    assert trace.endswith(f"{end}\n")
    assert "calls in lockstep, torch and Python" in trace
    assert trace.count("\n") < 16


def test_a_checkpoint_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint") as caught:
        load(tmp_path / "none.ckpt")
    assert caught.value.__suppress_context__


def test_a_line_of_ones_own_begins_where_a_bar_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of another rank stood behind rank 0's progress bar, on its line."""
    written: list[tuple[int, bytes]] = []
    monkeypatch.setattr(screen_text.os, "write", lambda file, text: written.append((file, text)))
    screen_text.wipe_line()  # no terminal here
    monkeypatch.setattr(screen_text.os, "isatty", lambda file: file == 2)
    monkeypatch.setenv("TERM", "dumb")
    screen_text.wipe_line()
    assert not written
    monkeypatch.setenv("TERM", "xterm")
    screen_text.wipe_line()
    assert written == [(2, b"\r\x1b[J\x1b[?25h")]


BAR = """
import sys, torch
from lockstep import LightningModule, Trainer
from lockstep.callbacks import RichProgressBar, TQDMProgressBar
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 12 and self.global_rank:
            raise KeyError("of rank 1")
        self.log("loss", 0.5, prog_bar=True)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
bar = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}[sys.argv[1]]()
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=[bar], logger=False, max_epochs=1,
                  enable_checkpointing=False, enable_model_summary=False)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(80, 1), batch_size=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_a_traceback_begins_on_a_line_of_its_own_and_stays_whole(bar: str, tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    (tmp_path / "bar.py").write_text(BAR)
    command = pexpect.spawn(
        sys.executable, [str(tmp_path / "bar.py"), bar], timeout=100, dimensions=(50, 300), encoding="utf-8"
    )
    command.expect(pexpect.EOF)
    command.close()
    screen = draw_run.Screen(300)
    screen.feed(command.before)
    lines = ["".join(letter for letter, _ in line).rstrip() for line in screen.lines]
    (first,) = (at for at, line in enumerate(lines) if "Traceback" in line)
    assert lines[first].removeprefix("[rank1]: ") == "Traceback (most recent call last):"
    assert any(line.removeprefix("[rank1]: ") == "KeyError: 'of rank 1'" for line in lines[first:]), lines
    last = [line for line in lines if line][-1]
    assert last.startswith("lockstep: rank 1 failed first, at ")


GATHERS = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import lockstep

class Module(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def validation_step(self, batch, batch_idx):
        self.log("value", batch.mean())
    def on_validation_epoch_end(self):
        if self.global_rank == 0:
            self.all_gather(torch.zeros(1000))
    def on_train_start(self):
        {fsdp}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def shard(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    layers(torch.zeros(1, 64))
    layers[rank](torch.zeros(1, 64))  # rank 1 skips a layer

loader = DataLoader(torch.zeros(16, 1), batch_size=2)
lockstep.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, strategy="ddp",
                 enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
                 ).fit(Module(), loader, loader)
"""


@pytest.mark.parametrize(
    ("fsdp", "line", "operation"),
    [
        pytest.param("pass", 17, "all_gather", id="all_gather"),
        pytest.param("shard(self.global_rank)", 32, "all_gather_into_tensor", id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_gather_other_sizes_are_named(
    ranks: RankPool, tmp_path: Path, fsdp: str, line: int, operation: str
) -> None:
    """gloo aborts a rank then, and the last line was "killed by SIGABRT"."""
    script = tmp_path / "train.py"
    script.write_text(GATHERS.format(fsdp=fsdp))
    (ended,) = run_script(ranks, script, folder=tmp_path)
    lines = ended.stderr.rstrip("\n").split("\n")
    assert lines[-1].startswith("lockstep: the ranks' calls do not match: "), ended.stderr
    assert f"{script}:{line}" in lines[-1]
    assert operation in lines[-1]
    assert len(lines) <= 40
