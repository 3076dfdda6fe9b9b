"""Every cluster by its variables, and which of them wins."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster import slurm
from lockstep.cluster.detect import Placement, detect, early_rank, is_placed
from lockstep.cluster.world import World, node_of
from lockstep.ground.errors import MisconfigurationException
from tests.cluster.variables import BATCH, HYDRA, JSRUN, MPIRUN, POD, TASK, TORCHRUN, Environ, variables, without

ONE_TASK = variables("SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_TASKS_PER_NODE=1")
LAST_OF_FOUR = World(3, 4, 1, 2, 1, 2, "head", 29500)


# -- each of them -------------------------------------------------------------------------------------------


def test_slurm() -> None:
    world = World(3, 4, 1, 2, 1, 2, "node1", 15007)
    assert detect(TASK) == detect(TASK, 2, 2) == Placement(world, launched=True, cluster="slurm")
    assert detect({**TASK, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}).world == LAST_OF_FOUR
    old = {"SLURM_STEPID": "0", "SLURM_NODELIST": "node[1-2]"}  # as earlier versions spell them
    gone = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    assert detect({**without(TASK, *gone, "SLURM_JOB_NODELIST"), **old}).world == world


def test_slurms_nodes_may_have_different_numbers_of_tasks() -> None:
    uneven = {**TASK, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert detect(uneven).world == World(3, 4, 0, 1, 1, 2, "node1", 15007)


def test_a_step_of_a_part_of_the_job() -> None:
    """`srun -n 2 -N 1 -w node2 --overlap`: the step's numbers count, not the job's."""
    step = TASK | variables("""
        SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=node2 SLURM_NODEID=0 SLURM_PROCID=1
        SLURM_STEP_ID=1
    """)
    assert detect(step).world == World(1, 2, 1, 2, 0, 1, "node2", 17318)


def test_ports_of_jobs_steps_and_attempts_differ() -> None:
    ports = {
        detect({**TASK, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": life}).world.port
        for job in ("7", "8")
        for step in ("0", "1")
        for life in ("0", "1")
    }
    assert len(ports) == 8
    assert all(15000 <= port < 30000 for port in ports)


def test_the_shell_of_a_batch_script_is_no_rank() -> None:
    """It has SLURM_PROCID=0 and SLURM_NTASKS=4, and looks like rank 0 of 4."""
    placement = detect(BATCH)
    assert placement.by_srun
    assert not placement.launched
    assert placement.world.size == 4
    assert detect(BATCH, 2, 2).by_srun
    assert slurm.given_world(BATCH) is None


def test_a_batch_script_with_one_task_starts_its_ranks_itself() -> None:
    one = BATCH | ONE_TASK
    assert detect(one, 2) == Placement(World(0, 2, 0, 2, 0, 1, "127.0.0.1", 0), launched=False)
    # without --ntasks SLURM_TASKS_PER_NODE counts processors
    assert detect({**without(one, "SLURM_NTASKS"), "SLURM_TASKS_PER_NODE": "8"}, 2).world.size == 2


@pytest.mark.parametrize(
    "environ",
    [
        {**without(BATCH, "SLURM_PROCID"), "SLURM_JOB_NAME": "interactive"},  # salloc
        {**TASK, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},  # srun --pty bash
        {**TASK, "SLURM_JOB_NAME": "work", "SLURM_PTY_PORT": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {**BATCH, "SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "4294967290"},
    ],
)
def test_an_interactive_allocation_is_one_process(environ: Environ) -> None:
    assert detect(environ) == Placement(World.single(), launched=False)
    assert not is_placed(environ)
    assert early_rank(environ) == 0


def test_sruns_tasks_in_an_interactive_allocation_are_ranks() -> None:
    """`salloc -N2 -n4; srun python train.py`: as four runs of their own they would write over each other."""
    assert detect({**TASK, "SLURM_JOB_NAME": "interactive"}).world.rank == 3


def test_lsf() -> None:
    world = World(3, 4, 1, 2, 1, 2, "h41n06", 19711)
    assert detect(JSRUN) == Placement(world, launched=True, cluster="lsf")
    assert detect({**JSRUN, "LSB_MCPU_HOSTS": "h41n06 42 h41n08 42"}).world == world  # no host of the script's own
    hosts = {**without(JSRUN, "LSB_MCPU_HOSTS"), "LSB_HOSTS": "batch5 h41n06 h41n06 h41n08"}
    assert detect(hosts).world == world
    assert detect(without(JSRUN, "JSM_NAMESPACE_LOCAL_SIZE")).world == world
    assert detect({**JSRUN, "MASTER_ADDR": "head", "MASTER_PORT": "29500"}).world == LAST_OF_FOUR


def test_lsfs_file_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text("batch5\nh41n06\nh41n06\nh41n08\nh41n08\n")
    environ = {**without(JSRUN, "LSB_MCPU_HOSTS"), "LSB_DJOB_RANKFILE": str(file)}
    assert detect(environ).world.address == "h41n06"
    with pytest.raises(MisconfigurationException, match=r"LSB_DJOB_RANKFILE=.*gone cannot be read \(No such file"):
        detect({**environ, "LSB_DJOB_RANKFILE": str(tmp_path / "gone")})


def test_kubeflow() -> None:
    world = World(3, 4, 0, 1, 3, 4, "job-master-0", 23456)
    assert detect(POD) == detect(POD, 1, 4) == Placement(world, launched=True, cluster="kubeflow")


def test_rank_and_world_size_around_sruns_tasks() -> None:
    """`srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=... python train.py'`: the local rank is SLURM's."""
    assert detect({**TASK, **POD}).world == World(3, 4, 1, 2, 1, 2, "job-master-0", 23456)


@pytest.mark.parametrize("environ", [{**MPIRUN, "MASTER_PORT": "2000"}, HYDRA, {
    **HYDRA, **{f"MV2_COMM_WORLD_{name}": value for name, value in zip(
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "3412", strict=True)}}])  # fmt: skip
def test_mpi(environ: Environ) -> None:
    assert detect(environ) == Placement(World(3, 4, 1, 2, 1, 2, "head", 2000), launched=True, cluster="mpi")


def test_mpis_ranks_on_one_host_need_no_address() -> None:
    one = {**without(MPIRUN, "MASTER_ADDR"), "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    world = detect(one).world
    assert (world.address, world.num_nodes, world.local_size) == ("127.0.0.1", 1, 4)
    assert world.port == detect({**one, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).world.port


def test_mpi_in_jobs_that_know_their_hosts() -> None:
    ranks = without(MPIRUN, "MASTER_ADDR")
    assert detect({**TASK, **ranks}).world.address == "node1"
    assert detect({**ranks, "LSB_MCPU_HOSTS": "batch5 1 h41n06 42 h41n08 42"}).world.address == "h41n06"


def test_sruns_own_pmi_variables_are_not_mpiruns() -> None:
    """`srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE, and no local rank."""
    assert detect({**TASK, "PMI_RANK": "3", "PMI_SIZE": "4"}).cluster == "slurm"


@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.data())
def test_nodes_are_found_from_ranks(local_size: int, nodes: int, by_node: bool, data: st.DataObject) -> None:
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, local_size - 1))
    rank = local * nodes + node if by_node else node * local_size + local
    found = node_of(rank, local, local_size, local_size * nodes)
    assert found[1] == nodes
    if not by_node or rank % local_size != local:  # where both ways fit, the usual one counts
        assert found[0] == node


# -- who wins -----------------------------------------------------------------------------------------------

ALL = {"torchelastic": TORCHRUN, "lsf": JSRUN, "mpi": MPIRUN, "slurm": TASK}


@pytest.mark.parametrize(
    ("names", "winner"),
    [
        (("slurm", "torchelastic"), "torchelastic"),  # torchrun in a SLURM job: SLURM_PROCID is the agent's
        (("slurm", "mpi"), "mpi"),  # mpirun in a SLURM job starts one task of srun's a node
        (("lsf", "mpi"), "lsf"),  # jsrun sets both
        (("slurm", "mpi", "lsf", "torchelastic"), "torchelastic"),
    ],
)
def test_which_wins(names: tuple[str, ...], winner: str) -> None:
    environ = {name: value for each in names for name, value in ALL[each].items()}
    assert detect(environ).cluster == winner
    assert early_rank(environ) == 3


@pytest.mark.parametrize("name", [*ALL, "kubeflow"])
def test_one_that_is_named_is_asked_alone(name: str) -> None:
    environ = {key: value for each in ALL.values() for key, value in each.items()}
    if name == "kubeflow":
        environ = {**without({**TASK, **JSRUN}, "SLURM_STEP_ID"), **POD}
    assert detect(environ, named=name).cluster == name


def test_ranks_that_lockstep_started_in_a_job_are_its_own() -> None:
    own = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    assert detect({**BATCH, **ONE_TASK, **own}, 2) == Placement(
        World(1, 2, 1, 2, 0, 1, "127.0.0.1", 4000), launched=True
    )


@given(st.sampled_from(sorted(ALL)), st.data())
def test_ranks_before_the_flags_are_those_after(name: str, data: st.DataObject) -> None:
    environ = dict(ALL[name])
    rank = data.draw(st.integers(0, 3))
    spread = {"rank": str(rank), "local": str(rank % 2), "node": str(rank // 2)}
    for key, part in {
        "RANK": "rank", "LOCAL_RANK": "local", "GROUP_RANK": "node",
        "SLURM_PROCID": "rank", "SLURM_LOCALID": "local", "SLURM_NODEID": "node",
        "JSM_NAMESPACE_RANK": "rank", "JSM_NAMESPACE_LOCAL_RANK": "local",
        "OMPI_COMM_WORLD_RANK": "rank", "OMPI_COMM_WORLD_LOCAL_RANK": "local",
    }.items():  # fmt: skip
        if key in environ:
            environ[key] = spread[part]
    world = detect(environ).world
    assert (world.rank, world.local_rank, world.node_rank) == (rank, rank % 2, rank // 2)
    assert early_rank(environ) == rank


# -- what is wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**TASK, "SLURM_PROCID": "4"}, r"SLURM: SLURM_PROCID=4, .*SLURM_LOCALID=1.*contradict each other.*with srun"),
        (without(TASK, "SLURM_LOCALID"), "variable SLURM_LOCALID is not set"),
        (without(JSRUN, "LSB_MCPU_HOSTS"), "LSF: the environment variable LSB_MCPU_HOSTS is not set: set MASTER_ADDR"),
        ({**JSRUN, "JSM_NAMESPACE_RANK": "4"}, "JSM_NAMESPACE_RANK|rank 4 of 4 is local rank 1 of 2"),
        (without(POD, "MASTER_ADDR"), r"variable MASTER_ADDR is not set: .*remove RANK=3 and WORLD_SIZE=4"),
        (
            without(MPIRUN, "MASTER_ADDR"),
            "MPI: the environment variable MASTER_ADDR is not set: .*mpirun -x MASTER_ADDR",
        ),
        ({**without(TORCHRUN, "RANK"), "TORCHELASTIC_RUN_ID": "job"}, "variable RANK is not set"),
        ({**TORCHRUN, "RANK": "4"}, "torchrun: RANK=4, WORLD_SIZE=4, LOCAL_RANK=1.*Start the script with torchrun"),
    ],
)
def test_variables_that_are_missing_or_contradict(environ: Environ, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=says):
        detect(environ)


@pytest.mark.parametrize(
    ("environ", "devices", "nodes", "says"),
    [
        (TASK, 4, 2, r"make 8 rank\(s\), but srun started 4 .*devices=2, num_nodes=2"),
        (TASK, 4, 1, r"srun put the 4 ranks on 2 node\(s\): use devices=2, num_nodes=2"),
        (TASK, None, 3, "num_nodes=3, but srun started ranks on 2"),
        (BATCH, 4, 2, r"SLURM job 7 has 2 node\(s\) with 2 task\(s\) on each: use devices=2, num_nodes=2, or "),
        ({**BATCH, "SLURM_TASKS_PER_NODE": "3,1"}, 2, 2, "with 3, 1 tasks: use devices='auto'"),
        (MPIRUN, 4, 1, "mpirun put the 4 ranks on 2"),
        (TORCHRUN, 2, 1, r"devices=2, num_nodes=1 make 2 rank.*torchrun started 4.*devices=2, num_nodes=2"),
    ],
)  # fmt: skip
def test_flags_against_the_cluster(environ: Environ, devices: int | None, nodes: int, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=says):
        detect(environ, devices, nodes)


def test_a_rank_that_is_left_over() -> None:
    """Each rank that lockstep started would have taken itself for this one."""
    with pytest.raises(MisconfigurationException, match="RANK=0 is set, without WORLD_SIZE"):
        detect({"RANK": "0"}, 2)
    assert detect({"RANK": "0"}, 1).world.size == 1
