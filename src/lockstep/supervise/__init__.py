"""Supervision: where ranks stand, what they wait for, and the first cause when one fails or hangs."""
