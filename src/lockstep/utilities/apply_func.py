"""Moving nested data, by the name that users import it from."""

from lockstep.ground.transfer import move_data_to_device

__all__ = ["move_data_to_device"]
