"""Supervision: the state of all ranks, what they wait for, and the first cause when one fails or hangs."""
