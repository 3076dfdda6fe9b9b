"""Callbacks and searches that not every training needs: averages of weights, pruning, spikes, throughput, the Tuner."""
