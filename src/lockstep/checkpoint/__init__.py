"""Checkpoint files, which are written atomically, carry a hash, and contain no code."""
