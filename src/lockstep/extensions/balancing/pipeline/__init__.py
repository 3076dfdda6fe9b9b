"""Pipelines: a chain of blocks in stages on several ranks, for an unchanged training_step."""
