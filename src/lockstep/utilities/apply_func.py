"""Functions that move nested data between devices, importable from here as in Lightning."""

from lockstep.ground.transfer import move_data_to_device

__all__ = ["move_data_to_device"]
