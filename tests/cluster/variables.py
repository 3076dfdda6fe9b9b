"""Environment variables that clusters set, for rank 3 of 4 on the second of two nodes."""

from __future__ import annotations

Environ = dict[str, str]


def variables(text: str) -> Environ:
    """Variables as ``env`` prints them, one a word."""
    return dict(word.split("=", 1) for word in text.split())


def without(environ: Environ, *names: str) -> Environ:
    return {name: value for name, value in environ.items() if name not in names}


# what an sbatch script of two nodes with two tasks each sees on a real SLURM 22.05
BATCH = variables("""
    SLURM_JOB_ID=7 SLURM_JOB_NAME=train.sh SLURM_NNODES=2 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2
    SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=node[1-2] SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
""")
TASK = BATCH | variables("""
    SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1-2]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)
""")
JSRUN = {"LSB_MCPU_HOSTS": "batch5 1 h41n06 42 h41n08 42"} | variables("""
    LSB_JOBID=4711 JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2
""")
POD = variables("MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=4 RANK=3")
MPIRUN = variables("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_MCA_ess_base_jobid=1412759553 MASTER_ADDR=head
""")
HYDRA = variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=head MASTER_PORT=2000")
TORCHRUN = variables("""
    RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=head
    MASTER_PORT=29500
""")
