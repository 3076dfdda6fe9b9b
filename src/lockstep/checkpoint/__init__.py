"""Checkpoint files: atomic, hashed, free of code."""
