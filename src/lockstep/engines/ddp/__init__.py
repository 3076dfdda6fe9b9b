"""Data parallel over ranks: buckets, the reducer and its transports, the strategy."""
