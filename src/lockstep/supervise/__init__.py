"""Supervision of all ranks. It detects failures and hangs, and reports which failure came first."""
