"""Hyperparameters as a dict, by the name that users import it from."""

from lockstep.ground.hyperparameters import AttributeDict

__all__ = ["AttributeDict"]
