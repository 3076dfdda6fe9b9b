"""The order of data, its cut among the ranks, and feeds that yield windows of weighted micro-batches."""
