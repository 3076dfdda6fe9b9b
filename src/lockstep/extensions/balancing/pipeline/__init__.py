"""Pipelines that split a chain of blocks into stages on several ranks, with an unchanged training_step."""
