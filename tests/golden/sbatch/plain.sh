#!/bin/bash
#SBATCH --job-name=plain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue

cd -- /home/me/project || exit 1
srun --kill-on-bad-exit=1 --export=ALL /opt/python train.py
