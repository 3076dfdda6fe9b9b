"""Exceptions, by the names that users import."""

from lockstep.ground.errors import MisconfigurationException, RankFailed

__all__ = ["MisconfigurationException", "RankFailed"]
