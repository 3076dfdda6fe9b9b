"""Norms of gradients; Lightning's import path."""

from lockstep.ground.parameters import grad_norm

__all__ = ["grad_norm"]
