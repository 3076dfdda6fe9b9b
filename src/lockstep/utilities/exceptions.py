"""Exceptions, by the names that users import."""

from lockstep.ground.errors import MisconfigurationException

__all__ = ["MisconfigurationException"]
