"""Data parallel over ranks: buckets, the reducer, DistributedDataParallel, communication hooks."""
