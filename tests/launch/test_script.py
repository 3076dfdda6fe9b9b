"""``strategy="ddp"``: the script once for each rank."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.cluster.local import rank_variables
from lockstep.cluster.world import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.script import MAILBOX, RANK_OF, ScriptLauncher, check_not_nested, command_line
from lockstep.supervise.mailbox import Mailbox
from tests.tools.fresh import python

TWO = World(0, 2, 0, 2, 0, 1, "127.0.0.1", 0)

SCRIPT = """
import os, sys
from lockstep.cluster.detect import detect
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.seed import current_seed, seed_everything
from lockstep.launch.environment import inherit
from lockstep.launch.script import ScriptLauncher

inherit()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

say("begins", rank_zero_only.rank, os.getcwd(), *sys.argv[1:], sys._xoptions, current_seed())
os.chdir("deeper")
sys.argv[1:] = []
first, second = (ScriptLauncher(detect(os.environ, 2).world) for _ in range(2))

def train(name):
    rank = first.world.rank
    say("trains", name, rank, first.world.port > 0)
    return 10 + rank

if rank_zero_only.rank == 0: seed_everything(5, verbose=False)
value = first.launch(train, name="a")
say("returned", value)
second.launch(lambda: say("again", second.world.rank, second.world.port == first.world.port))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    return tmp_path / "package" / "train.py"


def test_starts_the_same_command_once_for_each_rank_and_reuses_them(script: Path) -> None:
    location = script.parent.parent.resolve()
    done = python("-X", "utf8", "-m", "package.train", "--flag", "x", folder=location, seconds=110)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "again 0 True",
        "again 1 True",
        f"begins 0 {location} --flag x {{'utf8': True}} None",
        f"begins 1 {location} --flag x {{'utf8': True}} 5",
        "returned 10",
        "returned 11",
        "trains a 0 True",
        "trains a 1 True",
    ]


def main_module(file: str | None = None, spec: str | None = None) -> ModuleType:
    module = ModuleType("__main__")
    if file is not None:
        module.__file__ = file
    if spec is not None:
        module.__spec__ = ModuleSpec(spec, None)
    return module


@pytest.mark.parametrize(
    ("main", "argv", "original", "words"),
    [
        (main_module("/a/train.py"), "train.py x", "python train.py x", "/a/train.py x"),
        # the script took its argument out
        (main_module("/a/train.py"), "train.py", "python -W error train.py x", "/a/train.py x"),
        # under a debugger that was given another spelling
        (main_module("/a/train.py"), "/a/train.py x", "python -m debugger train.py y", "/a/train.py x"),
        (main_module("/a/pkg/train.py", "pkg.train"), "/a/pkg/train.py x", "python -m pkg.train x", "-m pkg.train x"),
        (main_module("/a/m.py", "pkg.__main__"), "/a/m.py", "python -m pkg -v", "-m pkg.__main__ -v"),
        (main_module("/a/app.zip/__main__.py", "__main__"), "app.zip x", "python app.zip x", "app.zip x"),
        (main_module(), "-c x", "python -Bc print() x", "-c print() x"),
    ],
)
def test_command_line(main: ModuleType, argv: str, original: str, words: str) -> None:
    command = command_line(main, argv.split(), original.split())
    assert command is not None
    assert command[0] == sys.executable
    assert command[-len(words.split()) :] == words.split()


def test_no_script_no_command() -> None:
    assert command_line(main_module(), [""], ["python"]) is None
    assert command_line(main_module("<stdin>"), ["-", "x"], ["python", "-", "x"]) is None


def test_an_interactive_session_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", main_module())
    monkeypatch.setattr(sys, "argv", [""])
    with pytest.raises(MisconfigurationException, match=r"strategy='ddp'.*use strategy='ddp_notebook'"):
        ScriptLauncher(TWO).launch(print)
    assert "LOCAL_RANK" not in os.environ


def test_a_started_rank_calls_and_leaves_a_note_on_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Mailbox()
    for name, value in rank_variables(World(1, 2, 1, 2, 0, 1, "127.0.0.1", 4000)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(MAILBOX, notes.address)
    monkeypatch.setenv(RANK_OF, "")
    launcher = ScriptLauncher(TWO)
    assert launcher.launch(lambda a, b: (a, b, launcher.world.rank, launcher.world.port), 1, b=2) == (1, 2, 1, 4000)
    with pytest.raises(ZeroDivisionError):
        launcher.launch(lambda: 1 / 0)
    assert [(note.rank, note.reason) for note in notes.read()] == [(1, "ZeroDivisionError: division by zero")]
    notes.close()


def test_one_rank_starts_nothing() -> None:
    assert ScriptLauncher(World.single()).launch(max, 1, 2) == 2
    assert "LOCAL_RANK" not in os.environ


# -- a run inside of a run's rank, by a process that has inherited the rank's variables --------------------------

RANK = World(1, 2, 1, 2, 0, 1, "127.0.0.1", 4000)


def test_a_rank_may_launch_again() -> None:
    environ = {"LOCAL_RANK": "1"}
    check_not_nested(RANK, environ)
    check_not_nested(RANK, environ)
    assert environ[RANK_OF] == f"{os.getpid()} 1/2 127.0.0.1:4000"


def test_another_process_with_its_variables_is_refused() -> None:
    environ = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", RANK_OF: "1 1/2 127.0.0.1:4000"}
    says = (
        r"of rank 1 of 2 at 127.0.0.1:4000 from process 1, which is that rank: "
        r".*\(env -u LOCAL_RANK -u WORLD_SIZE \.\.\.\)"
    )
    with pytest.raises(MisconfigurationException, match=says):
        check_not_nested(RANK, environ)


@pytest.mark.parametrize("other", ["1 1/2 127.0.0.1:4001", "1 0/4 127.0.0.1:4000", ""])
def test_a_launch_of_its_own_is_none(other: str) -> None:
    """torchrun or srun inside of a rank: its ranks have other numbers, or meet elsewhere."""
    check_not_nested(RANK, {RANK_OF: other})


FIRST = """
import os
from lockstep.launch.topology import here, launcher

def call(name):
    os.write(1, f"{os.environ.get('LOCAL_RANK')} {name}\\n".encode())

for devices in DEVICES:
    if devices == 1:
        launcher("script", here(None, 1))(call, "auto")  # on the CPU: one process, or the ranks that are there
    else:
        launcher("script", here(2, 1))(call, "two")
"""


@pytest.mark.slow
def test_a_rank_that_begins_with_a_call_that_rank_0_has_made_alone_is_told_so(tmp_path: Path) -> None:
    """It was in the script's first fit, while rank 0 was in the second: with other settings, or another model."""
    path = tmp_path / "train.py"
    path.write_text(FIRST.replace("DEVICES", "(1, 2)"))
    ended = python(path, folder=tmp_path)
    assert ended.returncode == 1
    assert sorted(ended.stdout.splitlines()) == ["0 two", "None auto"]
    assert ended.stderr.splitlines()[-1].startswith(f"lockstep: rank 1 failed first, at {path}:10: ")
    assert f"in the call at {path}:12, but this rank's first call of a Trainer is at {path}:10" in ended.stderr
    path.write_text(FIRST.replace("DEVICES", "(2, 1, 2)"))  # "auto" are the two by then
    ended = python(path, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["0 auto", "0 two", "0 two", "1 auto", "1 two", "1 two"]
