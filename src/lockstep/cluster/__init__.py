"""Who this process is among the ranks: one file per cluster, pure functions of the environment."""
