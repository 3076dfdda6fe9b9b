"""SlurmCluster: what it writes and submits, and how the process of a trial calls the user's function."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.extensions.search import cluster as clusters
from lockstep.extensions.search import trial_process
from lockstep.extensions.search.cluster import SlurmCluster
from lockstep.extensions.search.parser import HyperOptArgumentParser, Hyperparameters
from lockstep.extensions.search.queue import SlurmRefused
from lockstep.extensions.search.search import Search, query_trials
from lockstep.extensions.search.trials import TrialFolder, read_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only
from lockstep.testing.models import BoringModel
from tests.extensions.search.fake_slurm import FakeSlurm

PROJECT = Path(__file__).resolve().parents[3]
GOLDEN = PROJECT / "tests" / "golden" / "sbatch" / "page_of_2019.sh"
"""The script of the page's first trial; the others differ by the trial's folder alone."""
PAGE = """
from lockstep import HyperOptArgumentParser, SlurmCluster

PORT = 12910

def main(hparams):
    raise AssertionError("called where the trials are submitted")

parser = HyperOptArgumentParser(strategy='grid_search', add_help=False)
parser.opt_list('--learning_rate', default=0.001, type=float, options=[1e-3, 1e-2, 1e-1], tunable=True)
parser.opt_list('--layers', default=1, type=float, options=[16, 32, 64], tunable=True)
hyperparams = parser.parse_args()

cluster = SlurmCluster(
    hyperparam_optimizer=hyperparams,
    log_path='save',
    dry_run=True,
)

cluster.add_command('export NCCL_SOCKET_IFNAME=^docker0,lo')
cluster.add_command('export NCCL_DEBUG=INFO')
cluster.add_command('export MASTER_PORT=%r' % PORT)
cluster.load_modules(['NCCL/2.4.7-1-cuda.10.0'])
cluster.per_experiment_nb_nodes = 12
cluster.per_experiment_nb_gpus = 8
cluster.add_slurm_cmd(cmd='ntasks-per-node', value=8, comment='1 task per gpu')

cluster.optimize_parallel_cluster_gpu(
    main,
    nb_trials=9, # how many permutations of the grid search to run
    job_name='name_for_squeue'
)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture(autouse=True)
def first_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_calls", itertools.count())


def grid(count: int = 3) -> Hyperparameters:
    parser = HyperOptArgumentParser()
    parser.add_argument("--name", default="plain")
    parser.opt_list("--lr", default=1.0, type=float, options=[10.0**-number for number in range(count)], tunable=True)
    return parser.parse_args([])


def of(folder: Path, **settings: Any) -> SlurmCluster:
    settings = {"hyperparam_optimizer": grid(), "log_path": folder / "logs", **settings}
    return SlurmCluster(**settings)


def never(hparams: Any) -> None:
    raise AssertionError("called where the trials are submitted")


def search(folder: Path, name: str = "job") -> Search:
    return Search(folder / "logs" / name)


# -- writing -------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_and_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without SLURM, and as often as one likes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for count in (5, 3):
        of(tmp_path, hyperparam_optimizer=grid(count), dry_run=True).optimize_parallel_cluster_cpu(never, 5, "job")
    trials = search(tmp_path).trials()
    assert [trial.values() for trial in trials] == [{"name": "plain", "lr": 10.0**-number} for number in range(3)]
    for trial in trials:
        text = (trial.path / "job.sh").read_text()
        assert f"LOCKSTEP_TRIAL={trial.path}\n" in text
        assert f"#SBATCH --output={trial.path}/stdout\n" in text
        assert subprocess.run(["/bin/bash", "-n", trial.path / "job.sh"], capture_output=True).stderr == b""
        assert trial.events() == []


def test_the_page_of_2019_writes_nine_scripts(tmp_path: Path) -> None:
    """Its example as it stands, but for the import, the names it leaves open and ``dry_run``; without a SLURM here."""
    script = tmp_path / "page.py"
    script.write_text(PAGE)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    trials = Search(tmp_path / "save" / "name_for_squeue").trials()
    expected = [(rate, layers) for rate in (1e-3, 1e-2, 1e-1) for layers in (16.0, 32.0, 64.0)]
    assert [(trial.values()["learning_rate"], trial.values()["layers"]) for trial in trials] == expected
    for number, trial in enumerate(trials):
        written = trial.path / "job.sh"
        assert subprocess.run(["/bin/bash", "-n", written], capture_output=True).stderr == b""
        text = written.read_text().replace(sys.executable, "/opt/python").replace(str(tmp_path), "/home/me")
        if os.environ.get("LOCKSTEP_GOLDEN") == "write" and number == 0:
            GOLDEN.write_text(text)
        assert text == GOLDEN.read_text().replace("trial_0000", f"trial_{number:04}")


def test_a_thousand_trials_are_written_in_less_than_five_seconds(tmp_path: Path, slurm: FakeSlurm) -> None:
    options = grid(1000)
    cluster = of(tmp_path, hyperparam_optimizer=options, dry_run=True)
    began = time.process_time()
    cluster.optimize_parallel_cluster_cpu(never, 1000, "job")
    assert time.process_time() - began < 5
    assert len(list((tmp_path / "logs" / "job").glob("trial_*/job.sh"))) == 1000


def test_one_array_job_for_a_thousand_trials(tmp_path: Path, slurm: FakeSlurm) -> None:
    of(tmp_path, hyperparam_optimizer=grid(1000), array=True, at_most=50).optimize_parallel_cluster_cpu(
        never, 1000, "job"
    )
    assert slurm.calls("sbatch") == [["--parsable", "--array=0-999%50", str(tmp_path / "logs" / "job" / "job.sh"), "0"]]
    assert (tmp_path / "logs" / "job" / "trial_0999").is_dir()
    told = TrialFolder.of(tmp_path / "logs" / "job", 999).events()
    assert [(each["event"], each["job"]) for each in told] == [("submitted", "101_999")]
    slurm.says("squeue", "".join(f"101_{number}|PENDING|||\n" for number in range(1000)))
    began = time.process_time()
    statuses, _ = query_trials(search(tmp_path))
    assert time.process_time() - began < 1
    assert {status.state for status in statuses} == {"pending"}


def test_attributes_and_arguments_say_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "per_experiment_nb_nodes": 2, "per_experiment_nb_gpus": 4, "per_experiment_nb_cpus": 3, "gpu_type": "a100",
        "memory_mb_per_node": 1000, "job_time": "2:00:00", "minutes_to_checkpoint_before_walltime": 7,
    }  # fmt: skip
    texts = []
    for name in ("one", "two"):
        cluster = of(tmp_path, dry_run=True, **(settings if name == "one" else {}))
        for key, value in settings.items() if name == "two" else ():
            setattr(cluster, key, value)
        cluster.notify_job_status("me@example.org", on_done=True, on_fail=False)
        cluster.optimize_parallel_cluster_gpu(never, 3, name, job_display_name="shown")
        texts.append((search(tmp_path, name).trials()[0].path / "job.sh").read_text().replace(f"/{name}/", "/x/"))
    assert texts[0] == texts[1]
    for line in ("job-name=shown", "nodes=2", "ntasks-per-node=4", "gres=gpu:a100:4", "cpus-per-task=3", "mem=1000",
                 "time=2:00:00", "signal=USR1@420", "mail-user=me@example.org", "mail-type=END"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in texts[0]


def test_tasks_of_a_search_on_cpus_are_those_that_were_asked_for(tmp_path: Path) -> None:
    cluster = of(tmp_path, dry_run=True)
    cluster.add_slurm_cmd("ntasks-per-node", 2)
    cluster.optimize_parallel_cluster_cpu(never, 3, "job")
    text = (search(tmp_path).trials()[0].path / "job.sh").read_text()
    assert text.count("ntasks-per-node") == 1
    assert "#SBATCH --ntasks-per-node=2\n" in text
    assert "gres" not in text


def test_without_log_files_the_output_goes_nowhere(tmp_path: Path) -> None:
    of(tmp_path, dry_run=True, enable_log_out=False).optimize_parallel_cluster_cpu(never, 3, "job")
    text = (search(tmp_path).trials()[0].path / "job.sh").read_text()
    assert "#SBATCH --output=/dev/null\n" in text


@pytest.mark.parametrize(
    ("settings", "call", "said"),
    [
        ({}, {"nb_trials": 0}, r"nb_trials=0: pass an integer of at least 1"),
        ({}, {"job_name": "a/b"}, r"job_name='a/b' cannot name the folder of the search"),
        ({}, {"job_name": ".."}, r"job_name='\.\.' cannot name the folder"),
        ({"test_tube_exp_name": "a\nb"}, {}, r"test_tube_exp_name='a\\nb' cannot name the folder"),
        ({"log_path": None}, {}, r"log_path=None: .*a folder that all nodes see"),
        ({"log_path": "a\\b"}, {}, r"SLURM does not accept backslashes"),
        ({"log_path": "/proc/none"}, {}, r"log_path='/proc/none' cannot be written .*Use a writable folder"),
        ({"at_most": 2}, {}, r"at_most=2 is for array jobs only. Set array=True"),
        ({"array": True, "at_most": 0}, {}, r"at_most=0: pass an integer of at least 1"),
        ({"per_experiment_nb_nodes": 0}, {}, r"per_experiment_nb_nodes=0: pass an integer of at least 1"),
        (
            {"job_time": "0:05:00"},
            {},
            r"job_time .* 0:05:00 is not longer than minutes_to_checkpoint_before_walltime .* 5, in min",
        ),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, slurm: FakeSlurm, settings: dict[str, Any], call: dict[str, Any], said: str
) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        of(tmp_path, **settings).optimize_parallel_cluster_cpu(never, **{"nb_trials": 3, "job_name": "job", **call})
    assert slurm.calls("sbatch") == []


def test_no_slurm_here_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MisconfigurationException, match=r"no SLURM .*local=True.*dry_run=True"):
        of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_without_slurm_the_trials_run_here_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, in folders of the same kind; with the cluster for a function that wants it."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def main(hparams: Any, cluster: Any) -> float:
        if hparams.lr == 0.1:
            raise ValueError(f"not at {cluster.job_time}")
        return float(hparams.lr)

    of(tmp_path, local=True, job_time=90).optimize_parallel_cluster_cpu(main, 3, "job")
    statuses, _ = query_trials(search(tmp_path))
    assert [status.state for status in statuses] == ["completed", "failed", "completed"]
    assert statuses[1].error == "ValueError: not at 90"
    assert statuses[2].metrics == {"value": 0.01}
    with pytest.raises(MisconfigurationException, match="per_experiment_nb_gpus=99, but this machine has"):
        of(tmp_path, local=True, per_experiment_nb_gpus=99).optimize_parallel_cluster_gpu(main, 3, "job")


def test_a_search_that_was_submitted_is_not_written_over(tmp_path: Path, slurm: FakeSlurm) -> None:
    of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")
    with pytest.raises(MisconfigurationException, match=r"contains a search that was submitted\. Use another job_name"):
        of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")


# -- submitting ----------------------------------------------------------------------------------------------


def test_a_job_for_each_trial(tmp_path: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture) -> None:
    of(tmp_path).optimize_parallel_cluster_cpu(never, None, "job")
    folder = search(tmp_path).path
    assert slurm.calls("sbatch") == [["--parsable", f"{folder}/trial_000{n}/job.sh", "0"] for n in range(3)]
    assert [trial.events()[0]["job"] for trial in search(tmp_path).trials()] == ["101", "102", "103"]


def test_a_queue_that_is_full_after_the_second_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    """sbatch's own words, and which trials went in."""
    words = "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed"
    slurm.refuses("sbatch", words, after=2)
    with pytest.raises(SlurmRefused) as refused:
        of(tmp_path, hyperparam_optimizer=grid(5)).optimize_parallel_cluster_cpu(never, 5, "job")
    said = str(refused.value)
    assert said.splitlines()[0] == "sbatch: error: AssocMaxSubmitJobLimit; sbatch: error: Batch job submission failed"
    assert "submitted trial(s) 0-1 as jobs 101 to 102; not submitted: trial(s) 2-4" in said
    assert f"lockstep trials {search(tmp_path).path} --resubmit unsubmitted" in said
    assert [len(trial.events()) for trial in search(tmp_path).trials()] == [1, 1, 0, 0, 0]


def test_an_answer_of_sbatch_without_a_number_is_shown(tmp_path: Path, slurm: FakeSlurm) -> None:
    program = slurm.folder / "bin" / "sbatch"
    program.write_text("#!/bin/sh\necho welcome\n")
    with pytest.raises(SlurmRefused, match="sbatch printed 'welcome' instead of a job number"):
        of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")


# -- the process of a trial ----------------------------------------------------------------------------------


def enter(monkeypatch: pytest.MonkeyPatch, trial: TrialFolder, **variables: str) -> None:
    """Be the process of a trial."""
    monkeypatch.setattr(clusters, "_calls", itertools.count())
    for name, value in {"LOCKSTEP_TRIAL": str(trial.path), **variables}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    of(tmp_path, dry_run=True, max_preemptions=2).optimize_parallel_cluster_cpu(never, 3, "job")
    return search(tmp_path).trials()[1]


def test_a_trial_calls_the_function_with_its_values(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, trial)
    seen: list[Any] = []

    def main(hparams: Any, cluster: Any) -> float:
        seen.extend((hparams.lr, hparams.name, cluster))
        return 0.25

    cluster = of(tmp_path)
    cluster.optimize_parallel_cluster_cpu(main, 3, "job")
    assert seen == [0.1, "plain", cluster]
    assert trial.result()["metrics"] == {"value": 0.25}
    assert [told["event"] for told in trial.events()] == ["started", "completed"]
    assert trial.events()[1]["value"] == 0.25


def test_a_trial_keeps_what_the_trainer_logs(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of each epoch, and of an evaluation after the fit; no other Trainer writes anything."""

    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 1.0 / (self.current_epoch + 1))
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", 0.125)

    def main(hparams: Any) -> None:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            limit_train_batches=3,
            limit_test_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Logs())
        trainer.test(Logs(), verbose=False)

    enter(monkeypatch, trial)
    of(tmp_path).optimize_parallel_cluster_cpu(main, 3, "job")
    assert [(line["step"], line["metrics"]["train_loss"]) for line in trial.curves()[:2]] == [(3, 1.0), (6, 0.5)]
    assert trial.result()["metrics"] == {"train_loss": 0.5, "test_loss": 0.125}


def test_of_two_searches_in_a_script_a_trial_plays_its_own(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    of(tmp_path, dry_run=True).optimize_parallel_cluster_cpu(never, 3, "second")
    enter(monkeypatch, search(tmp_path, "second").trials()[0])
    called = []
    of(tmp_path).optimize_parallel_cluster_cpu(lambda hparams: called.append("first"), 3, "job")
    of(tmp_path).optimize_parallel_cluster_cpu(lambda hparams: called.append("second"), 3, "second")
    assert called == ["second"]


def test_an_exception_is_the_trials_last_word(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, trial)

    def main(hparams: Any) -> None:
        raise KeyError("no such layer")

    with pytest.raises(KeyError):
        of(tmp_path).optimize_parallel_cluster_cpu(main, 3, "job")
    statuses, _ = query_trials(search(tmp_path))
    assert (statuses[1].state, statuses[1].error) == ("failed", "KeyError: 'no such layer'")


@pytest.mark.parametrize(("code", "state"), [(0, "completed"), (None, "completed"), (3, "failed")])
def test_a_function_that_leaves_by_sys_exit(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch, code: int | None, state: str
) -> None:
    enter(monkeypatch, trial)

    def run() -> None:
        of(tmp_path).optimize_parallel_cluster_cpu(lambda hparams: sys.exit(code), 3, "job")

    if code:
        with pytest.raises(SystemExit):
            run()
    else:
        run()
    assert query_trials(search(tmp_path))[0][1].state == state


def test_another_rank_notes_its_failure_alone(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, trial)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    of(tmp_path).optimize_parallel_cluster_cpu(lambda hparams: 1.0, 3, "job")
    assert trial.events() == []
    monkeypatch.setattr(clusters, "_calls", itertools.count())
    with pytest.raises(ZeroDivisionError):
        of(tmp_path).optimize_parallel_cluster_cpu(lambda hparams: 1 / 0, 3, "job")
    assert [(told["event"], told["rank"]) for told in trial.events()] == [("failed", 1)]


def test_a_start_that_a_newer_one_has_replaced(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off, and comes back when the trial runs elsewhere."""
    trial.note("started", attempt=3, job="9")
    enter(monkeypatch, trial, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1")
    with pytest.raises(RuntimeError, match="was started again as attempt 3, so this attempt, 1, ends"):
        of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")
    assert [told["event"] for told in trial.events()] == ["started"]


def test_a_trial_that_is_requeued_behind_its_last_word_is_not_run_again(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was lost when the trial had ended and its job had not."""
    trial.note("started", attempt=0, job="8")
    trial.note("completed", attempt=0)
    enter(monkeypatch, trial, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1")
    of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")
    assert [told["event"] for told in trial.events()] == ["started", "completed"]


def test_a_trial_that_was_preempted_too_often_fails(
    tmp_path: Path, trial: TrialFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt in range(3):
        trial.note("started", attempt=attempt, job="8")
    enter(monkeypatch, trial, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="3")
    with pytest.raises(MisconfigurationException, match="was preempted 3 times, but max_preemptions is 2"):
        of(tmp_path).optimize_parallel_cluster_cpu(never, 3, "job")
    last = read_events(trial.events()).last
    assert last is not None
    assert (last.number, last.end) == (3, "failed")


def test_a_job_that_is_not_requeued_saves_and_goes_on(
    tmp_path: Path, trial: TrialFolder, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.refuses("scontrol", "Requested operation is presently disabled")
    enter(monkeypatch, trial, SLURM_JOB_ID="8", SLURM_PROCID="0", SLURM_STEP_ID="0")
    saved: list[str] = []

    def main(hparams: Any, cluster: SlurmCluster) -> float:
        os.kill(os.getpid(), signal.SIGUSR1)  # nothing can be saved yet
        cluster.set_checkpoint_save_function(lambda name: saved.append(name), {"name": "state"})
        os.kill(os.getpid(), signal.SIGUSR1)
        return 1.0

    of(tmp_path).optimize_parallel_cluster_cpu(main, 3, "job")
    assert saved == ["state"]
    assert slurm.calls("scontrol") == [["requeue", "8"]]
    assert [told["event"] for told in trial.events()] == ["started", "saved", "completed"]


SAVING = """
import os, signal, sys, time
from lockstep.extensions.search.cluster import SlurmCluster
def save(path):
    open(path, "a").write("saved ")
def load(path):
    open(path, "a").write("loaded ")
def main(hparams, cluster):
    cluster.set_checkpoint_save_function(save, kwargs={"path": PATH})
    cluster.set_checkpoint_load_function(load, kwargs={"path": PATH})
    if not os.environ.get("SLURM_RESTART_COUNT"):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)
    return 1.0
cluster = SlurmCluster(log_path=LOGS)
cluster.optimize_parallel_cluster_cpu(main, nb_trials=1, job_name="saving")
"""


@pytest.mark.slow
def test_the_users_own_functions_save_and_load(tmp_path: Path, slurm: FakeSlurm) -> None:
    """SIGUSR1 has them called, and the job put back into the queue, whose next start loads."""
    script, path = tmp_path / "saving.py", tmp_path / "state"
    script.write_text(f"PATH = {str(path)!r}\nLOGS = {str(tmp_path / 'logs')!r}\n{SAVING}")
    # SLURM ends a job that it requeues
    (slurm.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho $@ >>$0.calls\nkill -TERM $PPID\n")
    folder = TrialFolder.of(tmp_path / "logs" / "saving", 0)
    environ = {**os.environ, "PYTHONPATH": f"{PROJECT / 'src'}"}
    task = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "LOCKSTEP_TRIAL": str(folder.path)}
    codes = []
    for more in ({}, task, {**task, "SLURM_RESTART_COUNT": "1"}):
        codes.append(subprocess.run([sys.executable, script], env={**environ, **more}, timeout=60).returncode)
    assert codes == [0, -signal.SIGTERM, 0]
    assert path.read_text() == "saved loaded "
    assert (slurm.folder / "bin" / "scontrol.calls").read_text() == "requeue 77\n"
    assert [told["event"] for told in folder.events()] == ["submitted", "started", "saved", "started", "completed"]


# -- a copy of the code --------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> None:
    own = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", folder, *own, *words], check=True, capture_output=True)


@pytest.mark.slow
def test_a_snapshot_runs_what_was_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    """What git tracks, as it is in the work tree; PYTHONPATH leads to the copy, too."""
    home = tmp_path / "project"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "part.py").write_text("VALUE = 1\n")
    (home / "script.py").write_text(
        "import part\nfrom lockstep.extensions.search.cluster import SlurmCluster\n"
        f"cluster = SlurmCluster(log_path={str(tmp_path / 'logs')!r}, snapshot=True)\n"
        "cluster.optimize_parallel_cluster_cpu(lambda hparams: part.VALUE, nb_trials=1, job_name='copied')\n"
    )
    git(home, "init")
    path = f"{home / 'lib'}{os.pathsep}{PROJECT / 'src'}"
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}  # git would track what is written
    words = [sys.executable, "script.py", "--name", "a b"]
    refused = subprocess.run(words, cwd=home, env=environ, capture_output=True, text=True)
    assert "git does not track" in refused.stderr
    assert slurm.calls("sbatch") == []
    git(home, "add", ".")
    (home / "untracked").write_text("")
    subprocess.run(words, cwd=home, env=environ, check=True)
    (home / "lib" / "part.py").write_text("VALUE = 2\n")
    trial = TrialFolder.of(tmp_path / "logs" / "copied", 0)
    code = trial.path.parent / "code"
    assert sorted(str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()) == [
        "lib/part.py",
        "script.py",
    ]
    # the script's own lines, without srun
    job = (trial.path / "job.sh").read_text().replace("srun --kill-on-bad-exit=1 --export=ALL ", "")
    subprocess.run(["bash", "-c", job], env=environ, check=True, timeout=60)
    assert trial.result()["metrics"] == {"value": 1.0}


def test_what_main_may_look_like() -> None:
    def page(hparams: Any) -> None: ...
    def both(hparams: Any, cluster: Any) -> None: ...
    def optional(hparams: Any, verbose: bool = False) -> None: ...
    def named(hparams: Any, cluster: Any = None) -> None: ...
    def anything(*args: Any) -> None: ...

    assert [trial_process.takes_cluster(each) for each in (page, both, optional, named, anything)] == [
        False, True, False, True, True,
    ]  # fmt: skip


def test_settings_are_kept_for_later(tmp_path: Path) -> None:
    of(tmp_path, dry_run=True, array=True, at_most=2, max_failures=7).optimize_parallel_cluster_cpu(never, 3, "job")
    kept = json.loads((search(tmp_path).path / "search.json").read_text())
    assert (kept["array"], kept["at_most"], kept["max_failures"]) == (True, 2, 7)
    assert search(tmp_path).limits.failures == 7
