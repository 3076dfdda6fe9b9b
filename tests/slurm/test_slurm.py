"""Jobs on a real SLURM: launching, signals, pre-emption, requeueing, nodes that fail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.conftest import TRAIN, script
from tests.slurm.lab import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
PAUSED = f"--steps {STEPS} --pause 0.4"


def training(folder: Path, options: str = f"--steps {STEPS}") -> str:
    return f"python {TRAIN} --out {folder} {options}"


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def steps(folder: Path) -> list[tuple[int, int, int, str]]:
    """(attempt, step, ranks, node of rank 0) of each step."""
    history = folder / "history"
    lines = history.read_text().splitlines() if history.exists() else []
    return [(int(life), int(step), int(size), node) for life, step, size, node in map(str.split, lines)]


def await_step(folder: Path, number: int, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while len(steps(folder)) < number:
        assert time.monotonic() < until, f"step {number} did not come: {log(folder)[-2000:]}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights that two nodes x two tasks end with by themselves."""
    folder = tmp_path_factory.mktemp("undisturbed")
    number = lab.submit(script(folder, command=f"srun {training(folder)}"))
    assert lab.wait(number, seconds=200) == "COMPLETED", log(folder)
    assert [step[1:3] for step in steps(folder)] == [(step, 4) for step in range(1, STEPS + 1)]
    accuracy = float(log(folder).split("rank 0 of 4, accuracy ")[1].split()[0])
    assert accuracy > 0.8
    return (folder / "weights").read_text()


# -- starting -----------------------------------------------------------------------------------------------


def test_two_nodes_with_two_tasks_train_through_srun(undisturbed: str) -> None:
    assert len(undisturbed) == 64


def test_the_page_of_2019(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    """Its script runs `python my_main_file.py` without srun; conda and modules are stubs here."""
    stubs = "conda() { :; }; module() { :; }"
    number = slurm.submit(
        script(
            tmp_path,
            "#SBATCH --gres=gpu:2",
            "#SBATCH --mem=0",
            "#SBATCH --time=0-02:00:00",
            stubs,
            "conda activate my_env",
            "module load NCCL/2.4.7-1-cuda.10.0",
            "export NCCL_DEBUG=INFO",
            "export PYTHONFAULTHANDLER=1",
            "export NCCL_SOCKET_IFNAME=^docker0,lo",
            "export MASTER_PORT=$((12000 + RANDOM % 20000))",
            command=training(tmp_path, f"--steps {STEPS} --devices 2 --nodes 2"),
        )
    )
    assert slurm.wait(number, seconds=200) == "COMPLETED", log(tmp_path)
    assert f"SLURM job {number} has 4 tasks: starting " in log(tmp_path)
    assert log(tmp_path).count("rank 0 of 4, accuracy") == 1  # the batch script's own process trains nothing
    assert (tmp_path / "weights").read_text() == undisturbed


def test_variables_reach_every_rank_without_srun_too(slurm: Lab, tmp_path: Path) -> None:
    """Also where the job was submitted with `--export=NONE`, which keeps srun from handing variables down."""
    show = tmp_path / "show.py"
    show.write_text(
        "import os\n"
        "from lockstep import Trainer\n"
        "trainer = Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "names = ('NCCL_DEBUG', 'NCCL_SOCKET_IFNAME', 'PYTHONFAULTHANDLER', 'MINE', 'CUDA_DEVICE_ORDER')\n"
        "print(trainer.global_rank, trainer.world_size, *[os.environ.get(name) for name in names])\n"
    )
    number = slurm.submit(
        script(
            tmp_path,
            "#SBATCH --export=NONE",
            "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^lo PYTHONFAULTHANDLER=1 MINE=own",
            command=f"python {show}",
        )
    )
    assert slurm.wait(number) == "COMPLETED", log(tmp_path)
    said = sorted(line for line in log(tmp_path).splitlines() if line[:1].isdigit())
    assert said == [f"{rank} 4 INFO ^lo 1 own None" for rank in range(4)]


def test_nodes_with_different_numbers_of_tasks(slurm: Lab, tmp_path: Path) -> None:
    """`-N 2 -n 3` packs two tasks on the first node and one on the second."""
    job = script(tmp_path, command=f"srun {training(tmp_path, '--steps 5')}")
    text = job.read_text().replace("#SBATCH --ntasks-per-node=2", "#SBATCH --ntasks=3")
    job.write_text(text)
    number = slurm.submit(job)
    assert slurm.wait(number) == "COMPLETED", log(tmp_path)
    assert {size for _, _, size, _ in steps(tmp_path)} == {3}


# -- signals ------------------------------------------------------------------------------------------------


def submit_and_await(slurm: Lab, folder: Path, step: int, options: str = PAUSED, *lines: str) -> str:
    number = slurm.submit(script(folder, "#SBATCH --requeue", *lines, command=f"srun {training(folder, options)}"))
    await_step(folder, step)
    return number


def second_life(slurm: Lab, folder: Path, number: str, undisturbed: str) -> list[tuple[int, int, int, str]]:
    """The job was started twice and ends with the bits of an undisturbed one; gives the steps."""
    assert slurm.wait(number, seconds=300) == "COMPLETED", log(folder)
    assert slurm.job(number)["Restarts"] == "1"
    assert (folder / "weights").read_text() == undisturbed
    made = steps(folder)
    assert {life for life, *_ in made} == {0, 1}
    return made


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_job_that_is_signalled_requeues_itself(slurm: Lab, tmp_path: Path, undisturbed: str, name: str) -> None:
    """All ranks save together at a boundary, and the second life goes on with the next step."""
    number = submit_and_await(slurm, tmp_path, 8)
    slurm.run("scancel", f"--signal={name}", number)
    made = second_life(slurm, tmp_path, number, undisturbed)
    assert [step for _, step, *_ in made] == list(range(1, STEPS + 1))  # none twice
    assert log(tmp_path).count(f"SIG{name}: all ranks save to ") == 1
    assert list(tmp_path.glob("*.ckpt")) == []  # a fit that has ended well needs it no more


def test_one_rank_alone_that_is_signalled(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    """Signals to the ranks come at different times: what one has heard all do at the same boundary."""
    number = submit_and_await(slurm, tmp_path, 8)
    slurm.run("bash", "-c", f"srun --jobid={number} --overlap -N1 -n1 -w node2 "
              "bash -c 'kill -USR1 $(pgrep -f tests/slurm/[t]rain.py | head -n1)'")  # fmt: skip
    made = second_life(slurm, tmp_path, number, undisturbed)
    assert [step for _, step, *_ in made] == list(range(1, STEPS + 1))


def test_a_job_that_may_not_be_requeued_goes_on(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    number = slurm.submit(script(tmp_path, "#SBATCH --no-requeue", command=f"srun {training(tmp_path, PAUSED)}"))
    await_step(tmp_path, 8)
    slurm.run("scancel", "--signal=USR1", number)
    assert slurm.wait(number, seconds=200) == "COMPLETED", log(tmp_path)
    assert "the run is saved and continues, because the job was not requeued" in log(tmp_path)
    assert {life for life, *_ in steps(tmp_path)} == {0}
    assert (tmp_path / "weights").read_text() == undisturbed


def test_preemption(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    """A job of more weight takes all nodes: the first one saves, makes room, and comes back."""
    number = submit_and_await(slurm, tmp_path, 8)
    high = tmp_path / "high"
    high.mkdir()
    urgent = slurm.submit(script(high, "#SBATCH -p high", "#SBATCH --exclusive", nodes=4, command="srun sleep 3"))
    assert slurm.wait(urgent, seconds=100) == "COMPLETED"
    made = second_life(slurm, tmp_path, number, undisturbed)
    assert [step for _, step, *_ in made] == list(range(1, STEPS + 1))


def test_a_requeue_by_hand_goes_on_from_the_last_checkpoint(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    """`scontrol requeue` sends SIGTERM, and SIGKILL five seconds later: time enough to save."""
    number = submit_and_await(slurm, tmp_path, 8)
    slurm.run("scontrol", "requeue", number)
    made = second_life(slurm, tmp_path, number, undisturbed)
    assert [step for _, step, *_ in made] == list(range(1, STEPS + 1))
    assert "SIGTERM: all ranks save to " in log(tmp_path)


# -- nodes that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "power_off"])
def test_a_node_that_fails(slurm: Lab, tmp_path: Path, undisturbed: str, how: str) -> None:
    """The job comes up on other nodes, from its newest checkpoint."""
    if how == "power_off" and not slurm.has_networks:
        pytest.skip("the nodes share a network here")
    number = submit_and_await(slurm, tmp_path, 12, f"{PAUSED} --every 5")
    fail: Callable[[str], None] = getattr(slurm, how)
    fail("node2")
    made = second_life(slurm, tmp_path, number, undisturbed)
    assert Counter(step for _, step, *_ in made).keys() == set(range(1, STEPS + 1))
    assert min(step for life, step, *_ in made if life == 1) > 1
    assert "attempt 2: the fit continues from " in log(tmp_path)


def test_a_node_that_is_cut_off_writes_over_nothing(slurm: Lab, tmp_path: Path, undisturbed: str) -> None:
    """All ranks of the first life are on one node, which goes on without knowing that it has been replaced."""
    if not slurm.has_networks:
        pytest.skip("the nodes share a network here")
    options = "--steps 60 --pause 1.2 --every 5"
    job = script(tmp_path, "#SBATCH --requeue", command=f"srun {training(tmp_path, options)}", nodes=1, tasks=2)
    number = slurm.submit(job)
    await_step(tmp_path, 7)
    first = steps(tmp_path)[0][3]
    slurm.unplug(first)
    assert slurm.wait(number, seconds=300) == "COMPLETED", log(tmp_path)
    assert slurm.job(number)["Restarts"] == "1"
    last = steps(tmp_path)[-1]
    assert (last[0], last[1]) == (1, 60)
    assert last[3] != first
    # the first life came to a save when the second had begun, and ended there
    assert "has been restarted (SLURM_RESTART_COUNT=1, but 0 in this process)" in log(tmp_path)
    assert log(tmp_path).count("rank 0 of 2, accuracy") == 1
    assert [path.name for path in (tmp_path / "kept").glob("*step=60.ckpt")] == ["epoch=2-step=60.ckpt"]
