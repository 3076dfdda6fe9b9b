"""Validation of the Trainer's flags before a run starts, and the defaults of these flags."""
