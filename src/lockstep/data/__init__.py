"""The order of data, its division among the ranks, and the feeds that yield accumulation windows."""
