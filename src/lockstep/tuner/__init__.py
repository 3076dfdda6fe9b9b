"""The Tuner: a learning rate and a batch size to begin with, found by trying."""

from lockstep.tuner.tuning import Tuner

__all__ = ["Tuner"]
