"""Torch's features for data parallel training besides the reducer: containers, communication hooks, averaging."""
