"""Shares of the ranks that follow their speed, and the measured times of steps."""
