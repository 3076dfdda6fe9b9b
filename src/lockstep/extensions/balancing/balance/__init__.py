"""Shares of a global batch that follow the ranks' speed, and the measured times of steps."""
