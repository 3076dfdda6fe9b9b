"""Seeds and random states, by the names that users import."""

from lockstep.ground.seed import isolate_rng, seed_everything

__all__ = ["isolate_rng", "seed_everything"]
