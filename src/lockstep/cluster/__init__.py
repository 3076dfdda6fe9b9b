"""Detection of this process' rank: one file per cluster, with pure functions of the environment."""
