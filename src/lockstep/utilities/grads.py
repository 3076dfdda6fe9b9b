"""Norms of gradients, by the name that users import it from."""

from lockstep.ground.parameters import grad_norm

__all__ = ["grad_norm"]
