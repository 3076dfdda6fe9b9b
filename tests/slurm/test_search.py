"""Searches on a real SLURM: trials that are disturbed, cancelled and submitted anew, and values of any kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("lockstep.extensions.search.search", reason="needs the extension search")

from lockstep.extensions.search.search import Search, Status, query_trials
from lockstep.extensions.search.trials import TrialFolder, read_events
from tests.slurm.conftest import PROJECT
from tests.slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

SEARCHED = Path(__file__).with_name("searched.py")
STEPS = 40


def python(slurm: Lab, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """What this Python says to these words, where the cluster is."""
    source = os.pathsep.join((str(PROJECT / "src"), str(PROJECT)))
    environ = {**slurm.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stderr
    return done


def submit(slurm: Lab, folder: Path, *options: str) -> Search:
    """Submit the nine trials."""
    python(slurm, str(SEARCHED), "--log_path", str(folder), *options)
    return Search(folder / "digits")


def lockstep_trials(slurm: Lab, search: Search, *options: str) -> subprocess.CompletedProcess[str]:
    return python(slurm, "-m", "lockstep", "trials", str(search.path), *options)


def standing(slurm: Lab, search: Search) -> list[Status]:
    """How the trials stand, as SLURM's commands say it here."""
    before = dict(os.environ)
    os.environ["SLURM_CONF"] = slurm.environ["SLURM_CONF"]
    try:
        statuses, trouble = query_trials(search)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert trouble == ""
    return statuses


def await_states(slurm: Lab, search: Search, *states: str, seconds: float = 600) -> list[Status]:
    """Wait until each trial is in one of these states."""
    until = time.monotonic() + seconds
    while True:
        statuses = standing(slurm, search)
        if all(status.state in states for status in statuses):
            return statuses
        said = [(status.trial.number, status.state, status.error) for status in statuses]
        assert time.monotonic() < until, said
        time.sleep(1)


def steps(trial: TrialFolder) -> int:
    history = trial.path / "history"
    return history.read_text().count("\n") if history.exists() else 0


def await_steps(trials: Sequence[TrialFolder], number: int, seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while any(steps(trial) < number for trial in trials):
        assert time.monotonic() < until, [(trial.number, steps(trial), trial.last_line()) for trial in trials]
        time.sleep(0.2)


def weights(search: Search) -> list[str]:
    return [(trial.path / "weights").read_text() for trial in search.trials()]


def job(trial: TrialFolder) -> str:
    return read_events(trial.events()).jobs[-1]


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Nine trials as nine jobs, which nothing disturbs."""
    search = submit(lab, tmp_path_factory.mktemp("undisturbed"))
    await_states(lab, search, "completed")
    return search


def test_the_grid_of_the_page_of_2019(slurm: Lab, undisturbed: Search) -> None:
    """Nine jobs, nine results, the best one named."""
    trials = undisturbed.trials()
    assert len({job(trial) for trial in trials}) == 9
    assert len(set(weights(undisturbed))) == 9
    losses = [trial.result()["metrics"]["val_loss"] for trial in trials]
    said = lockstep_trials(slurm, undisturbed, "--sort", "val_loss").stdout.splitlines()
    assert said[0] == "digits: 9 trial(s): 9 completed"
    best = losses.index(min(losses))
    assert said[-1].startswith(f"best: trial {best}, val_loss {min(losses):.6g}")
    assert [line.split()[0] for line in said[2:11]] == [
        str(number) for number in sorted(range(9), key=losses.__getitem__)
    ]


def test_disturbed_trials_end_with_the_bits_of_undisturbed_ones(
    slurm: Lab, tmp_path: Path, undisturbed: Search
) -> None:
    """Two are requeued, one is signalled as before its wall time, and one's node is powered off."""
    search = submit(slurm, tmp_path, "--pause", "0.5")
    trials = search.trials()
    await_steps(trials[:6], 8)
    for trial in trials[:2]:
        slurm.run("scontrol", "requeue", job(trial))
    slurm.run("scancel", "--signal=USR1", job(trials[2]))
    last = read_events(trials[5].events()).last
    assert last is not None
    fail: Callable[[str], None] = slurm.power_off if slurm.has_networks else slurm.crash
    fail(last.host)
    statuses = await_states(slurm, search, "completed")
    assert weights(search) == weights(undisturbed)
    assert all(statuses[number].history.preemptions >= 1 for number in (0, 1, 2, 5))
    assert all(status.history.failures == 0 for status in statuses)
    for number in (0, 1, 2):  # saved at the boundary: no step is made twice
        made = [int(line.split()[1]) for line in (trials[number].path / "history").read_text().splitlines()]
        assert made == list(range(1, STEPS + 1))


def test_a_trial_that_nears_its_time_limit_goes_on_in_its_next_one(slurm: Lab, tmp_path: Path) -> None:
    """Signalled by SLURM itself: no step is made twice, and the bits are those of a trial without a limit."""
    one = ["--strategy", "random_search", "--nb_trials", "1"]
    search = submit(slurm, tmp_path / "limited", *one, "--pause", "4", "--minutes", "3")
    free = submit(slurm, tmp_path / "free", *one)
    (status,) = await_states(slurm, search, "completed")
    await_states(slurm, free, "completed")
    assert (status.history.preemptions, status.history.failures) == (1, 0)
    made = [int(line.split()[1]) for line in (status.trial.path / "history").read_text().splitlines()]
    assert made == list(range(1, STEPS + 1))
    assert weights(search) == weights(free)


def test_preempted_trials_of_a_cluster_that_cancels_are_submitted_anew(slurm: Lab, tmp_path: Path) -> None:
    """PreemptMode=CANCEL, where no job may be requeued: they go on from their checkpoints, as other jobs."""
    two = ["--strategy", "random_search", "--nb_trials", "2"]
    slurm.run("scontrol", "update", "PartitionName=main", "PreemptMode=CANCEL", "GraceTime=15")
    try:
        # saved at the signal, a trial goes on until it is cancelled: 32 steps are more than the grace time
        search = submit(slurm, tmp_path, *two, "--pause", "1", "--option", "no-requeue")
        await_steps(search.trials(), 8)
        urgent = tmp_path / "urgent.sh"
        urgent.write_text(f"#!/bin/bash\n#SBATCH -p high -N4 --exclusive -o {tmp_path}/urgent\nsleep 3\n")
        slurm.submit(urgent)
        await_states(slurm, search, "preempted", seconds=120)
        done = lockstep_trials(slurm, search, "--watch", "1", "--resubmit", "preempted")
        assert done.stderr.count("submitted trial(s) 0-1 as jobs") == 1
    finally:
        slurm.run("scontrol", "update", "PartitionName=main", "PreemptMode=REQUEUE", "GraceTime=30")
    statuses = await_states(slurm, search, "completed")
    assert [(len(status.history.jobs), status.history.preemptions) for status in statuses] == [(2, 1), (2, 1)]
    undisturbed = submit(slurm, tmp_path / "undisturbed", *two)
    await_states(slurm, undisturbed, "completed")
    assert weights(search) == weights(undisturbed)


def test_a_study_on_two_nodes(slurm: Lab, tmp_path: Path) -> None:
    """Twelve trials, four at a time, each on two ranks: pruned ones end on both at the same step."""
    optuna = pytest.importorskip("optuna")
    ranks = ["--tasks", "2", "--option", "exclude=node[3-4]", "--at_most", "4"]
    search = submit(slurm, tmp_path, "--strategy", "optuna", "--nb_trials", "12", "--epochs", "6", *ranks)
    statuses = await_states(slurm, search, "completed", "pruned", seconds=1200)
    assert "pruned" in {status.state for status in statuses}
    for status in statuses:
        ends = sorted(re.findall(r"rank (\d) ends at step (\d+)", (status.trial.path / "stdout").read_text()))
        assert [rank for rank, _ in ends] == ["0", "1"]
        assert len({step for _, step in ends}) == 1
        assert (int(ends[0][1]) < 60) == (status.state == "pruned")

    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(search.path / "study.journal"))
    )
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    counts = [trial.state.name.lower().replace("complete", "completed") for trial in study.trials]
    assert sorted(counts) == sorted(status.state for status in statuses)


FAILING = """
import os, sys
from pathlib import Path
from lockstep.extensions.search.cluster import SlurmCluster
from lockstep.extensions.search.parser import HyperOptArgumentParser
parser = HyperOptArgumentParser()
parser.opt_list("--number", default=0, type=int, options=[0, 1, 2], tunable=True)
parser.add_argument("--folder", type=Path)
parser.add_argument("--array", action="store_true")
hparams = parser.parse_args()

def main(hparams):
    if hparams.number == 1 and not (hparams.folder / "mended").exists():
        raise ValueError("the second one fails")
    if hparams.number == 2 and not (hparams.folder / "mended").exists():
        os._exit(0)
    return hparams.number

cluster = SlurmCluster(hyperparam_optimizer=hparams, log_path=hparams.folder, array=hparams.array)
cluster.optimize_parallel_cluster_cpu(main, 3, "failing")
"""


@pytest.mark.parametrize("how", [[], ["--array"]], ids=["jobs", "array"])
def test_a_failed_trial_is_failed_in_the_table_and_in_slurm(slurm: Lab, tmp_path: Path, how: list[str]) -> None:
    """One that ends without a last word is failed, too, though SLURM says COMPLETED; both are submitted anew."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    python(slurm, str(script), "--folder", str(tmp_path), *how)
    search = Search(tmp_path / "failing")
    statuses = await_states(slurm, search, "completed", "failed")
    assert [status.state for status in statuses] == ["completed", "failed", "failed"]
    assert statuses[1].error == "ValueError: the second one fails"
    assert statuses[2].error == "its process ended without reporting the trial's end"
    assert slurm.wait(job(search.trials()[1]), seconds=60) == "FAILED"
    assert slurm.wait(job(search.trials()[2]), seconds=60) == "COMPLETED"
    (tmp_path / "mended").touch()
    said = lockstep_trials(slurm, search, "--resubmit", "failed").stderr
    assert "submitted trial(s) 1-2 as jobs" in said
    statuses = await_states(slurm, search, "completed")
    assert [status.metrics["value"] for status in statuses] == [0, 1, 2]
    assert [status.history.failures for status in statuses] == [0, 1, 0]


# -- bad input -----------------------------------------------------------------------------------------------


HOSTILE = """
import json, sys
from pathlib import Path
from lockstep.extensions.search.cluster import SlurmCluster
from lockstep.extensions.search.parser import HyperOptArgumentParser
from lockstep.launch.attempts import trial_folder
folder = Path(sys.argv[1])
parser = HyperOptArgumentParser()
parser.opt_list("--values_", default=[], options=json.loads((folder / "values.json").read_text()), tunable=True)
hparams = parser.parse_args([])

def main(hparams):
    (Path(trial_folder()) / "arrived.json").write_text(json.dumps(hparams.values_))

cluster = SlurmCluster(hparams, log_path=folder, array=True, at_most=8)
cluster.optimize_parallel_cluster_cpu(main, None, sys.argv[2])
"""
INJECTED = "lockstep_was_injected"
JOB_NAME = f"a $(touch {INJECTED}); 'b\" `touch {INJECTED}` #c %j"
DRAWN = 980


def hostile_values() -> list[str]:
    """A thousand values: some by hand, the others drawn."""
    commands = [f"$(touch {INJECTED})", f"`touch {INJECTED}`", f"; touch {INJECTED}", f"\ntouch {INJECTED}\n"]
    others = ["a b", "'", '"', "'\"'\"", "\0", "--help", "-x", "", " ", "\\", "$HOME", "%j", "x" * 10_000, "\r\n",
              "\ud800", "!!"]  # fmt: skip
    drawn: list[str] = []

    @settings(max_examples=DRAWN, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.text(st.sampled_from("ab'\"\\$`;&|<>(){}[]*?~!#%= \t\r\n\0-") | st.characters(), max_size=40))
    def draw(text: str) -> None:
        drawn.append(text)

    draw()
    return [*commands, *others, *(drawn * 3)[:DRAWN]]


def test_a_thousand_hostile_values_arrive_unchanged(slurm: Lab, tmp_path: Path) -> None:
    """Through a real sbatch and its shell, with a job's name of the same kind; nothing in them is ever run."""
    values = hostile_values()
    assert len(values) == 1000
    (tmp_path / "values.json").write_text(json.dumps([values[at : at + 50] for at in range(0, 1000, 50)]))
    script = tmp_path / "a script; it's.py"
    script.write_text(HOSTILE)
    python(slurm, str(script), str(tmp_path), JOB_NAME)
    search = Search(tmp_path / JOB_NAME)
    await_states(slurm, search, "completed")
    arrived = [json.loads((trial.path / "arrived.json").read_text()) for trial in search.trials()]
    assert [value for part in arrived for value in part] == values
    assert list(tmp_path.rglob(INJECTED)) == []
    assert not Path(INJECTED).exists()
    assert lockstep_trials(slurm, search).stdout.startswith("a $(touch")
