"""The Trainer's flags, checked and completed before a run starts."""
