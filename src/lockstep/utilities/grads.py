"""Norms of gradients, importable from here as in Lightning."""

from lockstep.ground.parameters import grad_norm

__all__ = ["grad_norm"]
