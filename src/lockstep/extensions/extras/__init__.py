"""Optional callbacks and searches: averages of weights, pruning, spike detection, throughput, the Tuner."""
