"""The path at which `shard_optimizers` was."""

from __future__ import annotations

from lockstep.parallel.owned_optimizer import shard_optimizers as shard_optimizers
