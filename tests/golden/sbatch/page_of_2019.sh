#!/bin/bash
#SBATCH --job-name=name_for_squeue
#SBATCH --output=/home/me/save/name_for_squeue/trial_0000/stdout
#SBATCH --error=/home/me/save/name_for_squeue/trial_0000/stderr
#SBATCH --nodes=12
# 1 task per gpu
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue

LOCKSTEP_TRIAL=/home/me/save/name_for_squeue/trial_0000
LOCKSTEP_TRIAL_STARTS="${1:-0}"
PL_TRAINER_DEFAULT_ROOT_DIR="$LOCKSTEP_TRIAL"
export LOCKSTEP_TRIAL LOCKSTEP_TRIAL_STARTS PL_TRAINER_DEFAULT_ROOT_DIR
cd -- /home/me || exit 1
export NCCL_SOCKET_IFNAME=^docker0,lo
export NCCL_DEBUG=INFO
export MASTER_PORT=12910
module load NCCL/2.4.7-1-cuda.10.0 || { echo 'lockstep: the module NCCL/2.4.7-1-cuda.10.0 could not be loaded' >&2; exit 1; }
srun --kill-on-bad-exit=1 --export=ALL /opt/python /home/me/page.py
