"""The fit and evaluation loops, the steps of an accumulation window, and the state of the loops."""
