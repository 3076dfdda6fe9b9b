"""Replay: makes a step of a run again, and shows which of its samples and layers caused what it did."""
