"""Runs whose faults docs/replay.md finds."""
