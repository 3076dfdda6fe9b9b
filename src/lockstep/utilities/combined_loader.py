"""CombinedLoader, which iterates over several loaders; Lightning's import path."""

from lockstep.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
