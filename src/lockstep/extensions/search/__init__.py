"""Hyperparameter searches on one machine and on SLURM."""
