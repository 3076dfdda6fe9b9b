"""Shares of a global batch that adapt to the ranks' speed, and the measured times of steps."""
