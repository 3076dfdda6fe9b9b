"""The planner: cost of a model, speed of devices, prediction of each way to train, and a choice."""
