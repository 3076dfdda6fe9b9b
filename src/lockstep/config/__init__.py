"""Validation of the Trainer's flags, and their defaults, before a run starts."""
