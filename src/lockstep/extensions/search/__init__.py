"""Searches over hyperparameters: the options, the trials and their folders, on one machine and on SLURM."""
