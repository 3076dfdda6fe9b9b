"""Batch shares and pipelines that adapt to the speed of devices, and plans that predict memory and time."""
