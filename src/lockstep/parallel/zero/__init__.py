"""Optimizers whose work and state the ranks share (ZeRO stages 1 and 2)."""
