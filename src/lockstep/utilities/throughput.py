"""Throughput and operations per second, by the names that users import."""

from lockstep.ground.flops import get_available_flops, measure_flops
from lockstep.ground.throughput import Throughput

__all__ = ["Throughput", "get_available_flops", "measure_flops"]
