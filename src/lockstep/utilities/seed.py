"""Functions for seeds and random states; Lightning's import path."""

from lockstep.ground.seed import isolate_rng, seed_everything

__all__ = ["isolate_rng", "seed_everything"]
