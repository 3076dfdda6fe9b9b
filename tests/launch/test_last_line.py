"""The last line is one line of lockstep's own, whatever a message says; and a screen has at most 40 lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.supervise.causes import cause_of, judgement
from lockstep.supervise.stack import MOST, REASON, one_line, printable, reason_of, shortened

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
    assert one_line("a" * 400) == "a" * 300 + "... (400 characters)"
    assert printable("two\n\tlines\x1b[0m") == "two\n\tlines\\x1b[0m"
    with pytest.raises(SyntaxError) as caught:
        compile("1 +", "made.py", "exec")
    assert reason_of(caught.value) == "SyntaxError: invalid syntax"


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
        pytest.param(f"raise ValueError({FORGED!r})", "sys.excepthook", "ValueError: it broke\\nlockstep", id="forged"),
        pytest.param("raise ValueError('m' * 6_000_000)", "sys.excepthook", "ValueError: mmm", id="6 MB"),
        pytest.param("raise ValueError('no')", "broken", "ValueError: no", id="hook"),
    ],
)
def test_the_last_line_of_a_script(tmp_path: Path, what: str, hook: str, says: str) -> None:
    """A message of 6 MB ended the script with 137; a broken excepthook had everything printed twice."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(what=what, hook=hook))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, script], capture_output=True, timeout=120, env=environ, cwd=tmp_path)
    lines = ended.stderr.decode().rstrip("\n").split("\n")
    assert lines[-1].startswith(f"lockstep: rank 1 failed first, at {script}:13: {says}")
    assert len(lines) <= 40
    assert ended.returncode == 1


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
def test_ranks_that_gather_other_sizes_are_named(tmp_path: Path, fsdp: str, line: int, operation: str) -> None:
    """gloo aborts a rank then, and the last line was "killed by SIGABRT"."""
    script = tmp_path / "train.py"
    script.write_text(GATHERS.format(fsdp=fsdp))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, script], capture_output=True, timeout=120, env=environ, cwd=tmp_path)
    lines = ended.stderr.decode().rstrip("\n").split("\n")
    assert lines[-1].startswith("lockstep: the ranks' calls do not match: "), ended.stderr.decode()
    assert f"{script}:{line}" in lines[-1]
    assert operation in lines[-1]
    assert len(lines) <= 40
