"""Functions for seeds and random states, importable from here as in Lightning."""

from lockstep.ground.seed import isolate_rng, seed_everything

__all__ = ["isolate_rng", "seed_everything"]
