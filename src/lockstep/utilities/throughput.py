"""Throughput and operations per second, by the names that users import."""

from lockstep.ground.throughput import Throughput, get_available_flops, measure_flops

__all__ = ["Throughput", "get_available_flops", "measure_flops"]
