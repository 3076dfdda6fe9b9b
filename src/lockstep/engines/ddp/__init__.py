"""Data parallel training: the strategy, and the reducer that averages gradients in buckets."""
