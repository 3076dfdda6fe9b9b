"""Planner that predicts memory and time of each way to train, from a model's profile and devices' speed."""
