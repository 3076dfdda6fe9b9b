"""The order of the samples, their division among the ranks, and the feeds that yield accumulation windows."""
