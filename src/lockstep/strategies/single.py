"""One process on one device."""

from __future__ import annotations

from lockstep.strategies.base import Strategy


class SingleDeviceStrategy(Strategy):
    """Everything on one device; the base class does it all."""
