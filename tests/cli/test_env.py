"""`lockstep env` and `lockstep --version`: what they tell, from where, and what they never tell."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.cli import env as shown
from lockstep.cli.run import COMMANDS, main
from lockstep.cluster.detect import explained
from lockstep.ground.extensions import commands
from lockstep.launch.environment import FAMILIES, HIDDEN, NAMES, variables_in_use
from tests.project.test_packaging import project

__all__ = ["project"]  # a fixture

PACKAGE = Path(lockstep.__file__).parent
STEP = {"JOB_ID": "77", "STEP_ID": "0", "PROCID": "1", "LOCALID": "1", "NODEID": "0", "NTASKS": "2"}
STEP |= {"STEP_NUM_TASKS": "2", "TASKS_PER_NODE": "2", "JOB_NODELIST": "node1"}
SRUN = {f"SLURM_{name}": value for name, value in STEP.items()}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}


def test_the_help_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    found = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert found == [*COMMANDS, *commands()]
    for command in found:
        with pytest.raises(SystemExit) as ended:  # as argparse does it
            main([command, "--help"])
        assert ended.value.code == 0
        assert f"usage: lockstep {command}" in capsys.readouterr().out


def test_versions_devices_and_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {**TORCHRUN, **MEETING, "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert main(["env", "--full"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.MULTILINE)
    assert re.search(r"^  cpu +\d+ core\(s\)", text, re.MULTILINE)
    assert "cluster: torchelastic\n  torchrun started this process" in text
    assert "rank: 3 of 4; 1 of 2 on its node; node 1 of 2\n  rendezvous of the ranks: node1, port 29400\n" in text
    assert "\n  OMP_NUM_THREADS=3\n" in text
    assert main(["env", "--json", "--full"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(shown.report()))
    assert found["rank"]["world_size"] == 4
    assert found["variables"]["MASTER_ADDR"] == "node1"


def test_gpus_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 2**30

    assert shown.report()["devices"].keys() >= {"cpu"}
    monkeypatch.setattr(shown.CUDAAccelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    devices = shown.report()["devices"]
    assert [devices[f"cuda:{number}"] for number in range(2)] == ["Some GPU, 80.0 GiB; CUDA 13.0"] * 2
    monkeypatch.setattr(shown.CUDAAccelerator, "is_available", lambda: False)
    assert shown.report()["devices"]["cuda"] == "none; torch is built for CUDA 13.0"


def test_a_report_has_no_names_of_hosts_and_users_and_short_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown.socket, "gethostname", lambda: "gpu-17.lab.example")
    monkeypatch.setattr(shown.getpass, "getuser", lambda: "ada")
    names = {"PL_TRAINER_DEFAULT_ROOT_DIR": "/home/ada/secret-project/runs", "SLURM_JOB_NODELIST": "gpu-[17-18]"}
    for name, value in {**TORCHRUN, **MEETING, **names, "MASTER_ADDR": "gpu-17", "PL_TRAINER_LOGGER": "ada"}.items():
        monkeypatch.setenv(name, value)
    for options in ([], ["--json"]):
        assert main(["env", *options]) == 0
        text = capsys.readouterr().out
        for private in ("gpu-17", "gpu-[", "ada", "secret-project", "/home"):
            assert private not in text, private
        assert ".../runs" in text
        assert "HOST" in text
        assert torch.__version__ in text


# -- why -----------------------------------------------------------------------------------------------------


def test_a_task_of_srun() -> None:
    found = explained(SRUN)
    assert found.cluster == "slurm"
    assert found.world is not None
    assert (found.world.rank, found.world.size) == (1, 2)
    assert found.why == "srun started this process"


def test_a_batch_script_and_a_rank_of_lockstep() -> None:
    batch = explained({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"})
    assert (batch.cluster, batch.world) == ("slurm", None)
    assert "the batch script of the SLURM job 7, not a rank; a Trainer starts its 4 tasks with srun" in batch.why
    rank = explained({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", **MEETING})
    assert (rank.cluster, rank.world is not None and rank.world.rank) == ("local", 1)
    assert rank.why == "lockstep started this process"


# -- variables -----------------------------------------------------------------------------------------------


def test_every_variable_that_is_read_is_told_of() -> None:
    """The files that may read the environment name no variable that the list does not have."""
    none = {"CONF_FILE", "PCI_BUS_ID", "SC_CLK_TCK"}  # ends of names, values, what the system is asked
    unknown = set()
    for folder in ("cluster", "launch", "supervise"):
        for file in (PACKAGE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|[A-Z_]*RANK", text) and not text.startswith("TCP_"):
                    unknown |= {text} - NAMES - none
    unknown = {name for name in unknown if not name.startswith(FAMILIES)}
    assert unknown <= {"LOCAL_SIZE"}  # the end of a name of MPI's


def test_what_looks_like_a_secret_is_not_shown() -> None:
    values = {
        "PL_TRAINER_LOGGER": "https://me:hunter2@host/store",
        "NCCL_AUTH": "hunter2",
        "LOCKSTEP_API_KEY": "hunter2",
        "PL_TRAINER_DEFAULT_ROOT_DIR": "0123456789abcdef0123456789abcdef01",
    }
    assert variables_in_use(values) == dict.fromkeys(sorted(values), HIDDEN)
    assert variables_in_use({"WANDB_API_KEY": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2", "HOME": "/home/me"}) == {}
    plain = {"CUDA_VISIBLE_DEVICES": "GPU-5ebe9f43-ac33-4207-b9bc-27a8f1c2a3b4", "PL_TRAINER_DEVICES": "2"}
    assert variables_in_use(plain) == plain
