"""Functions that move nested data between devices; Lightning's import path."""

from lockstep.ground.transfer import move_data_to_device

__all__ = ["move_data_to_device"]
