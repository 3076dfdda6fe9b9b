"""Data parallel training over ranks: buckets, the reducer and its transports, the strategy."""
