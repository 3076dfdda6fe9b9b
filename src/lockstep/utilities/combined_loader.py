"""CombinedLoader, which iterates over several loaders, importable from here as in Lightning."""

from lockstep.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
