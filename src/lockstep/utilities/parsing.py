"""AttributeDict, a dict for hyperparameters, importable from here as in Lightning."""

from lockstep.ground.hyperparameters import AttributeDict

__all__ = ["AttributeDict"]
