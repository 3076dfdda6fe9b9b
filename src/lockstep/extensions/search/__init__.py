"""Hyperparameter searches: their trials run on this machine or as SLURM jobs."""
