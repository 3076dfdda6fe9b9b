"""Optional callbacks and the Tuner: averages of weights, pruning, spike detection, throughput, searches."""
