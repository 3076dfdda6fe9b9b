#!/bin/bash
#SBATCH --job-name="a job; $(touch x)"
#SBATCH --array=0-999%16
#SBATCH --output="/logs/100%% sure/trial_%4a/stdout"
#SBATCH --error=/dev/null
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4
#SBATCH --cpus-per-task=6
#SBATCH --mem=64000
#SBATCH --time=1-12:00:00
#SBATCH --signal=USR1@600
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=FAIL
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --partition=long
# all of it
#SBATCH --exclusive
#SBATCH --comment="a \"b\" \\ #c"

printf -v LOCKSTEP_TRIAL "%s/trial_%04d" '/logs/100% sure' "$SLURM_ARRAY_TASK_ID"
LOCKSTEP_TRIAL_STARTS="${1:-0}"
PL_TRAINER_DEFAULT_ROOT_DIR="$LOCKSTEP_TRIAL"
export LOCKSTEP_TRIAL LOCKSTEP_TRIAL_STARTS PL_TRAINER_DEFAULT_ROOT_DIR
export PYTHONPATH='/a b:/c'
cd -- '/home/me/some; folder' || exit 1
module purge
srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=6 python3 -X dev 'a script.py' --text $'it\'s\012"so"' --empty ''
