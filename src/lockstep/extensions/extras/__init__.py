"""Optional callbacks and the Tuner: weight averages, pruning, spike detection, throughput, searches for settings."""
