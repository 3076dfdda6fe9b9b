"""Memory of a training step: activation checkpointing, and a report of memory use."""
