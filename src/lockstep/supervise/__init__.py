"""Supervision of all ranks. It detects failures and hangs, and reports the first cause."""
