"""Trials on this machine: processes, devices, failures, and what is kept."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions.search import local
from lockstep.extensions.search import parser as parser_module
from lockstep.extensions.search.local import Trials, share_devices
from lockstep.extensions.search.lock import FileLock, holding
from lockstep.extensions.search.parser import HyperOptArgumentParser, Hyperparameters
from lockstep.extensions.search.trials import TrialFolder, read_events
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.environment import trial_environment, visible_devices


def options(values: list[Any], **settings: Any) -> Hyperparameters:
    parser = HyperOptArgumentParser(**settings)
    parser.opt_list("--x", options=values, tunable=True)
    return parser.parse_args([])


# -- without processes ----------------------------------------------------------------------------------------


class Ended:
    """In the place of a trial's process: it ends at once, by what a table says for its number."""

    started: list[tuple[int, str | None]] = []
    ends: dict[int, Any] = {}

    def __init__(self, trial: TrialFolder, trials: Trials, devices: str | None) -> None:
        self.trial, self.returncode = trial, 0
        self.started.append((trial.number, devices))
        trial.note("started", attempt=0, job=None)
        end = self.ends.get(trial.number, 1.0)
        if isinstance(end, float):
            trial.note("completed", attempt=0, value=end)
        elif isinstance(end, str):
            trial.note("failed", attempt=0, error=end)
            self.returncode = 1
        else:
            self.returncode = -9
        self._process = self

    code = property(lambda self: lambda: self.returncode)
    outcome = local._Process.outcome

    def signal(self, number: int) -> None: ...

    def wait(self) -> None: ...


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> type[Ended]:
    monkeypatch.setattr(local, "_Process", Ended)
    Ended.started, Ended.ends = [], {}
    return Ended


def test_a_failed_trial_does_not_stop_the_rest(at_once: type[Ended], tmp_path: Path) -> None:
    at_once.ends = {0: "ValueError: no", 1: None, 2: 0.5}
    found = options([5, 6, 7]).optimize_parallel_cpu(print, 3, 2, tmp_path)
    assert [(each.number, each.state, each.hparams.x, each.value) for each in found] == [
        (0, "failed", 5, None), (1, "failed", 6, None), (2, "completed", 7, 0.5),
    ]  # fmt: skip
    assert found[0].error == "ValueError: no"
    assert found[1].error == "its process was killed by SIGKILL without reporting the trial's end"


def test_where_all_fail_the_call_raises(at_once: type[Ended]) -> None:
    at_once.ends = {0: "ValueError: no", 1: None}
    with pytest.raises(RuntimeError, match=r"all 2 trial\(s\) failed. Trial 0: ValueError: no"):
        options([1, 2]).optimize_parallel_cpu(print)


def test_what_has_completed_is_not_run_again(at_once: type[Ended], tmp_path: Path) -> None:
    at_once.ends = {1: "ValueError: no"}
    options([1, 2, 3]).optimize_parallel_cpu(print, log_path=tmp_path)
    at_once.started, at_once.ends = [], {}
    found = options([1, 2, 3]).optimize_parallel_cpu(print, log_path=tmp_path)
    assert [number for number, _ in at_once.started] == [1]
    assert [each.state for each in found] == ["completed"] * 3


def test_a_folder_of_another_search_is_refused(at_once: type[Ended], tmp_path: Path) -> None:
    options([1, 2]).optimize_parallel_cpu(print, log_path=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"option 'x' is .*\[1, 2\].* there, and .*\[1, 3\].* here"):
        options([1, 3]).optimize_parallel_cpu(print, log_path=tmp_path)


def test_another_search_got_the_results_of_the_first_as_its_own(at_once: type[Ended], tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def begun(name: str = "lr", high: float = 1.0, epochs: int = 3, nb_trials: int = 2, **settings: Any) -> int:
        parser = HyperOptArgumentParser(**{"strategy": "optuna", **settings})
        parser.opt_range(f"--{name}", low=0.0, high=high, tunable=True)
        parser.add_argument("--epochs", default=epochs)
        at_once.started = []
        parser.parse_args([]).optimize_parallel_cpu(print, nb_trials, log_path=tmp_path)
        return len(at_once.started)

    assert begun() == 2
    for other, said in (
        ({"strategy": "random_search"}, 'strategy is "optuna" there, and "random_search" here'),
        ({"mode": "max"}, 'mode is "min" there, and "max" here'),
        ({"name": "width"}, "option 'lr' is .* there, and unknown here; option 'width' is unknown there"),
        ({"high": 2.0}, "option 'lr' is .*1.0.* there, and .*2.0.* here"),
        ({"epochs": 5}, "option 'epochs' is 3 there, and 5 here. Use another log_path"),
    ):
        with pytest.raises(MisconfigurationException, match=said):
            begun(**other)  # type: ignore[arg-type]
        assert at_once.started == []
    assert begun(nb_trials=3, seed=7) == 1  # the same one goes on


def test_a_random_search_with_another_seed_is_refused(at_once: type[Ended], tmp_path: Path) -> None:
    options([1, 2, 3], strategy="random_search").optimize_parallel_cpu(print, 3, log_path=tmp_path)
    with pytest.raises(MisconfigurationException, match=r"a trial of another search, with values .* earlier seed"):
        options([1, 2, 3], strategy="random_search", seed=9).optimize_parallel_cpu(print, 3, log_path=tmp_path)


def test_the_same_call_made_twice_at_a_time_ran_each_trial_twice(at_once: type[Ended], tmp_path: Path) -> None:
    (tmp_path / local.CALL).touch()
    with holding(FileLock(str(tmp_path / local.CALL))):
        said = rf"is running in process {os.getpid()} of .* another log_path\. .* remove .*call\.pkl\.lock"
        with pytest.raises(MisconfigurationException, match=said):
            options([1, 2]).optimize_parallel_cpu(print, log_path=tmp_path)
    assert at_once.started == []
    os.symlink("elsewhere|1|1", tmp_path / "call.pkl.lock")  # of another host
    with pytest.raises(MisconfigurationException, match="in process 1 of elsewhere"):
        options([1, 2]).optimize_parallel_cpu(print, log_path=tmp_path)
    (tmp_path / "call.pkl.lock").unlink()
    assert len(options([1, 2]).optimize_parallel_cpu(print, log_path=tmp_path)) == 2
    assert not os.path.lexists(tmp_path / "call.pkl.lock")


def test_a_file_system_without_links_has_no_lock_and_says_so(
    at_once: type[Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*words: str) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert len(options([1, 2]).optimize_parallel_cpu(print, log_path=tmp_path)) == 2
    assert "the lock cannot be created" in caplog.text


def test_devices_are_shared_out(at_once: type[Ended], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_module, "visible_devices", lambda: ["2", "3", "5", "7"])
    hparams = options([1, 2, 3, 4])
    hparams.optimize_parallel(print, nb_workers=2)
    assert {devices for _, devices in at_once.started} <= {"2,5", "3,7"}
    at_once.started = []
    hparams.optimize_parallel_gpu(print)
    assert at_once.started[0] == (0, "2")
    at_once.started = []
    hparams.optimize_parallel_gpu(print, gpu_ids=["0, 1"], max_nb_trials=4)
    assert {devices for _, devices in at_once.started} == {"0,1"}
    at_once.started = []
    hparams.optimize_parallel_cpu(print)
    assert {devices for _, devices in at_once.started} == {""}
    assert share_devices(["0", "1"], 3) == ["0", "1", "0"]


def test_without_gpus_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_module, "visible_devices", list)
    with pytest.raises(MisconfigurationException, match=r"no GPU to run a trial on.*optimize_parallel_cpu"):
        options([1]).optimize_parallel_gpu(print)


@pytest.mark.parametrize("workers", [0, -1, True, 1.5])
def test_a_number_of_workers_that_is_none_is_refused(workers: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"nb_workers=.*at least 1"):
        options([1]).optimize_parallel_cpu(print, 1, workers)


def test_a_function_that_cannot_travel_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(MisconfigurationException, match=r"cannot be pickled for their processes .*lock"):
        options([1]).optimize_parallel_cpu(lambda hparams: lock, 1, 1, tmp_path)


def test_the_environment_of_a_trial() -> None:
    found = trial_environment("/x/trial_0001", 10**6, "0,1", True, {"HOME": "/root"})
    assert found["LOCKSTEP_TRIAL"] == found["PL_TRAINER_DEFAULT_ROOT_DIR"] == "/x/trial_0001"
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"], found["HOME"]) == ("0,1", "1", "/root")
    given = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "4"}
    found = trial_environment("/x/trial_0001", 2, None, False, given)
    assert found.items() >= given.items()
    assert "PL_TRAINER_DEFAULT_ROOT_DIR" not in found
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4, GPU-1"}) == ["4", "GPU-1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


# -- with them ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_process_for_each_trial(tmp_path: Path) -> None:
    """One returns, one raises, one is killed; the values arrive as they are."""

    class Local:  # of this function alone: it travels by value
        factor = 2.0

    def train(hparams: Any) -> float:
        print("trial", json.dumps(hparams.x))
        if hparams.x == "raises":
            raise RuntimeError("no\ngood")
        if hparams.x == "dies":
            os.kill(os.getpid(), 9)
        return Local.factor * len(hparams.x)

    hostile = "$(touch x); '\"\n\0 --é\ud800"
    found = options(["raises", hostile, "dies"]).optimize_parallel_cpu(train, 3, 3, tmp_path)
    assert [(each.number, each.state, each.value, each.hparams.x) for each in found] == [
        (0, "failed", None, "raises"), (1, "completed", 2.0 * len(hostile), hostile), (2, "failed", None, "dies"),
    ]  # fmt: skip
    assert found[0].error == "RuntimeError: no good"
    assert "SIGKILL" in found[2].error
    folders = [TrialFolder.of(tmp_path, number) for number in range(3)]
    assert (folders[1].path / "stdout").read_text() == f"trial {json.dumps(hostile)}\n"
    assert [history.last.end for history in map(read_events, (each.events() for each in folders)) if history.last] == [
        "failed", "completed", "failed",
    ]  # fmt: skip


SHOW = """
import sys, torch
from torch.utils.data import DataLoader
from lockstep import HyperOptArgumentParser, LightningModule, Trainer
from lockstep.callbacks import PruneTrial

class Net(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(1, 1), lr
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def on_train_epoch_end(self):
        self.log("loss", self.lr * (self.current_epoch + 1 + self.global_rank), sync_dist=True)
        self.log("steps", float(self.global_step))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def main(hparams):
    trainer = Trainer(max_epochs=4, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                      callbacks=[PruneTrial(monitor="loss")])
    trainer.fit(Net(hparams.lr), DataLoader(torch.ones(8, 1), batch_size=2))
    print("rank", trainer.global_rank, "ends at", trainer.global_step, flush=True)

parser = HyperOptArgumentParser(strategy="optuna", seed=3)
parser.opt_range("--lr", type=float, low=0.1, high=1.0, tunable=True)
outcomes = parser.parse_args([]).optimize_parallel_cpu(main, nb_trials=12, nb_workers=4, log_path=sys.argv[1])
for each in outcomes:
    print(each.number, each.state)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twelve_trials_on_two_ranks_each_with_a_median_pruner(tmp_path: Path) -> None:
    import subprocess
    import sys

    optuna = pytest.importorskip("optuna")
    (tmp_path / "show.py").write_text(SHOW)
    search = tmp_path / "show"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "show.py"), str(search)], capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stderr
    states = dict(line.split() for line in done.stdout.splitlines())
    assert len(states) == 12
    assert set(states.values()) <= {"completed", "pruned"}
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(search / "study.journal")))
    entries = optuna.load_study(study_name="show", storage=storage).trials
    assert len(entries) == 12
    for entry in entries:
        number = entry.user_attrs["lockstep_trial"]
        printed = (TrialFolder.of(search, number).path / "stdout").read_text().splitlines()
        ends = dict(line[5:].split(" ends at ") for line in printed if line.startswith("rank "))
        assert ends.keys() == {"0", "1"}
        assert ends["0"] == ends["1"]  # both ranks, at the same step
        assert {"COMPLETE": "completed", "PRUNED": "pruned"}[entry.state.name] == states[str(number)]
        assert int(ends["0"]) == 2 * len(entry.intermediate_values)
    assert "pruned" in states.values()
