"""`lockstep run`: what its words mean, what is said of wrong ones, and runs whose ranks are killed."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.run import COMMANDS, main, name_of, planned
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import commands
from lockstep.launch.elastic_run import LaunchPlan, refuse_nested, start
from lockstep.launch.environment import free_port
from tests.cli.restarted import train
from tests.launch.sessions import kill
from tests.tools.crash import Kill
from tests.tools.fresh import PYTHONPATH
from tests.tools.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("restarted.py")
COMMAND = [sys.executable, "-m", "lockstep", "run"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


# -- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--devices 2 --max-restarts 3 train.py --lr 0.1 --devices 5",
        "train.py --devices 2 --max-restarts 3 --lr 0.1 --devices 5",
        "--devices=2 train.py --max-restarts=3 --lr 0.1 --devices 5",
        "--devices 2 --max-restarts 3 -- train.py --lr 0.1 --devices 5",
        "train.py --devices 2 --max-restarts 3 -- --lr 0.1 --devices 5",
    ],
)
def test_options_stand_before_the_script_and_directly_behind_it(words: str, script: Path) -> None:
    plan = planned(words.split())
    assert plan.words == ("train.py", "--lr", "0.1", "--devices", "5")
    assert (plan.devices, plan.max_restarts, plan.nodes, plan.resume) == (2, 3, (1, 1), False)


def test_a_module(script: Path) -> None:
    plan = planned(["--devices", "2", "-m", "json.tool", "--resume", "a.json"])
    assert (plan.words, plan.resume) == (("-m", "json.tool", "a.json"), True)


def test_several_nodes(script: Path) -> None:
    words = ["--nodes", "2", "--node-rank", "1", "--master-addr", "node1", "--devices", "4", "train.py"]
    plan = planned(words)
    assert (plan.nodes, plan.node_rank, plan.address, plan.port) == ((2, 2), 1, "node1", 29400)
    assert plan.flags == "--devices 4 --nodes 2"
    assert planned(["--nodes", "1:3", "--rdzv-endpoint", "node1:77", "train.py"]).address == "node1"
    assert planned(["--nodes", "1:3", "--rdzv-endpoint", "node1:77", "train.py"]).flags == "--devices 1 --nodes 1:3"


def test_the_same_command_has_the_same_name_and_another_one_another() -> None:
    assert name_of(["a/train.py", "--lr", "1"]) == name_of(["b/train.py", "--lr", "1"])
    names = {name_of(words) for words in (["train.py"], ["train.py", "1"], ["-m", "train"], ["other.py"])}
    assert len(names) == 4
    assert re.fullmatch(r"my_script-[0-9a-f]{6}", name_of(["my script.py"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no script is given. Example: lockstep run train.py"),
        ("trian.py", r"trian.py does not exist \(working directory: .*\)"),
        ("-m no_such_module", "-m no_such_module: the module does not exist"),
        ("--devices 0 train.py", "--devices 0 is not a number of ranks. Pass a number of at least 1, or auto"),
        ("--device 2 train.py", "--device is not an option. `lockstep run --help` lists the options"),
        ("--max-restarts x train.py", "argument --max-restarts: 'x' is not a whole number of at least 0"),
        ("--nodes 3:2 train.py", "--nodes 3:2 is not a number of nodes. Pass a number of at least 1, or MIN:MAX"),
        ("--nodes 2 train.py", "--nodes 2 needs --master-addr. Pass an address of node 0"),
        ("--nodes 2 --rdzv-endpoint a:b train.py", "--rdzv-endpoint a:b is not of the form HOST:PORT"),
        (
            "--nodes 2 --node-rank 2 --master-addr a train.py",
            "--node-rank 2 is out of range for --nodes 2. Pass 0 to 1",
        ),
        ("--node-rank 1 --master-addr a train.py", "--node-rank 1, --master-addr a is only for several nodes"),
        (
            "--nodes 2 --master-addr a --master-port 99999 train.py",
            "--master-port 99999 is not a port. Pass a number from 1 to",
        ),
        ("--devices 2 train.py --devices 3", "--devices is given both before and after train.py"),
    ],
)
def test_wrong_words_are_answered_by_one_sentence(words: str, said: str, script: Path) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        planned(words.split())


def test_the_command_prints_the_sentence_alone(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "other.txt"]) == 2
    assert main(["rum"]) == 2
    assert main([]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("lockstep run: other.txt does not exist")
    every = ", ".join([*COMMANDS, *commands()])
    assert told[1:] == [
        f"lockstep: {wrong}; choose one of: {every}" for wrong in ("'rum' is not a command", "no command is given")
    ]


def test_the_commands_of_the_page_can_be_typed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "run.md").read_text(), re.DOTALL)
    commands = [line.removeprefix("lockstep run ").split() for block in blocks for line in block.splitlines()]
    (script.parent / "project").mkdir()
    (script.parent / "project" / "train.py").touch()
    monkeypatch.syspath_prepend(str(script.parent))
    assert [planned(words).words for words in commands] == [
        ("train.py", "--lr", "0.1"),
        ("-m", "project.train"),
        ("train.py",),
        ("train.py",),
    ]


@pytest.mark.parametrize(
    "environ", [{"RANK": "1", "LOCAL_RANK": "1"}, {"TORCHELASTIC_RUN_ID": "x"}, {"LOCAL_RANK": "0"}]
)
def test_a_rank_starts_no_ranks(environ: dict[str, str]) -> None:
    name, value = next(iter(environ.items()))
    with pytest.raises(MisconfigurationException, match=rf"is a rank itself \({name}={value}.*env -u {name}"):
        refuse_nested(environ)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        plan = LaunchPlan(("a.py",), "a", 1, (2, 2), node_rank=0, address="127.0.0.1", port=port)
        with pytest.raises(
            MisconfigurationException, match=rf"--master-port {port}: .* cannot listen .*choose another"
        ):
            start(plan, {})


# -- runs ----------------------------------------------------------------------------------------------------


_begun: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _none_goes_on() -> Iterator[None]:
    """What a test has begun ends with it, and all that this has started."""
    yield
    while _begun:
        process = _begun.pop()
        kill(process.pid)
        process.communicate()


def begin(words: list[Any], folder: Path, **environ: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _begun.append(process)
    return process


def digests(text: str) -> dict[str, str]:
    return dict(re.findall(r"^digest of (\w+): ([0-9a-f]{64})$", text, re.MULTILINE))


def undisturbed(ranks: RankPool, folder: Path) -> dict[str, str]:
    (folder / "whole").mkdir()
    found: dict[str, str] = ranks(2).run(train, folder / "whole", timeout=60)[0]
    return found


def killed(folder: Path, kills: list[tuple[int, Kill]], restarts: int) -> str:
    words = [word for fit, kill in kills for word in ("--kill", f"{fit}:{kill}")]
    process = begin(["--devices", 2, "--max-restarts", restarts, SCRIPT, folder, *words], folder)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    assert text.count("all ranks are restarted") == len(kills), text
    return text


@pytest.mark.slow  # every day by parts: a script without torch is started anew, below; tests/launch/test_rerun.py
def test_when_a_rank_is_killed_the_run_ends_with_the_bits_of_one_that_nobody_disturbed(
    ranks: RankPool, tmp_path: Path
) -> None:
    """In its second fit, which saves itself nowhere; the first is not run again, and its Result is the same."""
    text = killed(tmp_path, [(2, Kill(rank=1, step=20))], restarts=1)
    assert "was killed by SIGKILL" in text
    assert "lockstep run, attempt 2: this fit ended in an earlier attempt, so it is not run again" in text
    assert re.search(r"attempt 2: the fit continues from .*/lockstep-run-restarted-\w+-\w+-fit-2.ckpt", text)
    assert digests(text) == undisturbed(ranks, tmp_path)
    left = {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file() and "whole" not in str(path)
    }
    assert left == {"kept/epoch=2-step=21.ckpt"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_when_ranks_are_killed_twice_the_bits_are_the_same(seed: int, ranks: RankPool, tmp_path: Path) -> None:
    """Anywhere, a save included, but that at a fit's end, behind which there is no other death in it."""
    draw = random.Random(seed)
    kills = []
    for fit in draw.choice([(1, 1), (1, 2), (2, 2)]):
        moment = draw.choice(["batch", "batch", "save", "write", "rename"])
        rank = draw.randrange(2) if moment in ("batch", "save") else 0
        kills.append((fit, Kill(rank=rank, step=draw.randint(2, 14), moment=moment)))
    kills.sort(key=lambda kill: (kill[0], kill[1].step))
    text = killed(tmp_path, kills, restarts=2)
    print(f"seed {seed}: {'; '.join(f'fit {fit}: {kill}' for fit, kill in kills)}")
    assert digests(text) == undisturbed(ranks, tmp_path)


SLEEPER = """
import os, sys, time
from pathlib import Path
from lockstep import Callback
from tests.loop.pieces import Slope, numbers, quiet

class Slow(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        Path(f"ready-{trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.05)

trainer = quiet(max_epochs=1, callbacks=[Slow()])
module = Slope(lr=0.01)
result = trainer.fit(module, numbers(int(sys.argv[1])))
if trainer.is_global_zero:
    print("ended:", result.stopped, round(module.w.item(), 9), flush=True)
"""


def sleeper(folder: Path, batches: int, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that has come to its first batches, and the processes of its ranks."""
    (folder / "sleeper.py").write_text(SLEEPER)
    process = begin([*flags, "--devices", 2, "sleeper.py", batches], folder, PYTHONPATH=PYTHONPATH)
    return process, pids_in(process, [folder / f"ready-{rank}" for rank in range(2)])


def pids_in(process: subprocess.Popen[str], files: list[Path]) -> list[int]:
    """The processes that ranks have noted in files, once all have."""
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]


def gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_an_agent_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    """Under torchrun they go on as orphans. Also if the script imports no torch."""
    script = "import os, pathlib, time\npathlib.Path(os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(60)"
    (tmp_path / "plain.py").write_text(script)
    process = begin(["--devices", 2, "plain.py"], tmp_path, TMPDIR=str(tmp_path))  # a killed agent leaves its folder
    pids = pids_in(process, [tmp_path / "0", tmp_path / "1"])
    process.kill()
    assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted by Ctrl-C"), (signal.SIGTERM, 143, "ended by SIGTERM")],
)
def test_a_signal_to_the_agent_ends_the_ranks_in_order(number: int, code: int, said: str, tmp_path: Path) -> None:
    process, pids = sleeper(tmp_path, 4000)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == code, text
    assert text.rstrip().splitlines()[-1] == f"lockstep: {said}"
    assert all(gone(pid) for pid in pids)
    assert ("ended: interrupted by Ctrl-C" in text) == (number == signal.SIGINT)  # the script goes on after its fit


@pytest.mark.slow
def test_resume_goes_on_where_sigterm_has_ended_the_run(tmp_path: Path) -> None:
    first, _ = sleeper(tmp_path, 100, "--resume")
    first.send_signal(signal.SIGTERM)
    text, _ = first.communicate(timeout=60)
    assert "SIGTERM: all ranks save to" in text
    second, _ = sleeper(tmp_path, 100, "--resume")
    text, _ = second.communicate(timeout=60)
    assert "lockstep run, attempt 2: the fit continues from" in text
    assert f"ended: max_epochs=1 reached {-0.01 * sum(range(1, 101)) / 2}" in text
    assert {path.name for path in tmp_path.iterdir()} == {"sleeper.py", "ready-0", "ready-1"}


NODES = """
import os, signal, sys
from pathlib import Path
from lockstep import Callback
from tests.loop.pieces import Slope, numbers, quiet

class Kill(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 6 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

trainer = quiet(max_epochs=4, callbacks=[Kill()])
module = Slope(lr=0.01)
trainer.fit(module, numbers(8))
print("ended:", trainer.global_rank, trainer.node_rank, round(module.w.item(), 9), flush=True)
"""


@pytest.mark.slow
def test_agents_of_two_nodes_start_their_ranks_anew_together(tmp_path: Path) -> None:
    """Each counts its own restarts, so that the ranks of one attempt may have different counts."""
    (tmp_path / "nodes.py").write_text(NODES)
    meeting = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--local-addr", "127.0.0.1"]
    environ = {"PYTHONPATH": PYTHONPATH}
    agents = []
    for node in (1, 0):  # torch would give rank 0 to the one that was started first
        words = ["nodes.py", "--max-restarts", 2, *meeting, "--node-rank", node]
        agents.insert(0, begin(words, tmp_path, **environ))
    for node, agent in enumerate(agents):
        text, _ = agent.communicate(timeout=120)
        assert agent.returncode == 0, text
        assert f"ended: {node} {node} {-0.01 * 4 * (1.5 + 3.5 + 5.5 + 7.5)}" in text


def test_a_script_that_keeps_failing_is_given_up_with_its_cause_as_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    )
    process = begin(["--devices", 2, "--max-restarts", 1, "fails.py"], tmp_path)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    first, last = text.splitlines()
    assert re.fullmatch(
        r"lockstep: rank 1 \(process \d+\) ended with exit code 3; all .* restarted \(no restarts left\)", first
    )
    assert re.fullmatch(r"lockstep: rank 1 \(process \d+\) ended with exit code 3", last)


EARLY = {
    "an exception": ("import math\n\nmath.sqrt(-1)\n", 3, "ValueError: math domain error"),
    "a module that is missing": ("import no_such_module\n", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
    "no Python": ("x = 1\nfor\n", 2, "SyntaxError: invalid syntax"),
    "before the Trainer": (
        "import lockstep\n\nraise OSError('labels.csv is not here')\n",
        3,
        "OSError: labels.csv is not",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", EARLY)
def test_what_fails_before_the_trainer_is_the_last_line(tmp_path: Path, what: str) -> None:
    """It was "ended with exit code 1"."""
    text, line, reason = EARLY[what]
    (tmp_path / "early.py").write_text(text)
    process = begin(["--devices", 2, "early.py"], tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    last = said.rstrip("\n").split("\n")[-1]
    assert re.match(rf"lockstep: rank [01] failed first, at \S*early\.py:{line}: {re.escape(reason)}", last), said
