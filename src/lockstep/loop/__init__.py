"""The loops: fit, one window of it, evaluation, and the state they keep."""
