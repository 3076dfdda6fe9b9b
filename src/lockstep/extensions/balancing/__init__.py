"""Shares of batches and pipelines that follow the speed of devices, and plans that predict memory and time."""
