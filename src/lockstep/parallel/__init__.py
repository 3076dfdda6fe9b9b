"""The data-parallel engine: buckets, reducer, DistributedDataParallel."""
