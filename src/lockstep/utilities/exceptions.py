"""Exceptions that lockstep raises, importable from here as in Lightning."""

from lockstep.ground.errors import MisconfigurationException, NonFiniteError, RankFailed

__all__ = ["MisconfigurationException", "NonFiniteError", "RankFailed"]
