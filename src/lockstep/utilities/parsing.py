"""AttributeDict, a dict for hyperparameters; Lightning's import path."""

from lockstep.ground.hyperparameters import AttributeDict

__all__ = ["AttributeDict"]
