"""Exceptions that lockstep raises; Lightning's import path."""

from lockstep.ground.errors import MisconfigurationException, NonFiniteError, RankFailed

__all__ = ["MisconfigurationException", "NonFiniteError", "RankFailed"]
