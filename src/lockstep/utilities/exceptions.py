"""Exceptions, by the names that users import."""

from lockstep.ground.errors import MisconfigurationException, NonFiniteError, RankFailed

__all__ = ["MisconfigurationException", "NonFiniteError", "RankFailed"]
