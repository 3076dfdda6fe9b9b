"""Several loaders as one, by the name that users import it from."""

from lockstep.data.combined import CombinedLoader

__all__ = ["CombinedLoader"]
