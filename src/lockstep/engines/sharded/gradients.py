"""Gradients of sharded parameters: each rank's shards, and whole gradients that wait for a reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.engines.gradients import Gradients
from lockstep.ground.parameters import local_part

if TYPE_CHECKING:
    from lockstep.engines.sharded.fully_shard import ShardedModule  # noqa: F401  # named below, in a string


class ShardedGradients(Gradients["ShardedModule"]):
    """Gradients of a module with shards as parameters, except for some whole ones."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """Return this rank's shards, and whole gradients that wait for a reduction."""
        found = [*super().local(stepped), *([] if stepped else self.holder.gathered()[1])]
        return list({id(gradient): local_part(gradient) for gradient in found}.values())

    def held(self) -> dict[str, Any]:
        """Return the gradients of whole parameters, and under ``"sharded"`` this rank's gradients of the others."""
        named, shards = self.engine.named_parameters(), self.holder
        whole = {name: p.grad for name, p in named.items() if name not in shards.parameters and p.grad is not None}
        return {"gradients": {n: each.detach().cpu().clone() for n, each in whole.items()}, "sharded": shards.held()}

    def hold(self, saved: dict[str, Any]) -> None:
        """Restore gradients from `held`; of whole gradients of sharded parameters, this rank takes its part."""
        from lockstep.engines.sharded.fully_shard import cut_like

        given, parts = saved.get("gradients", {}), self.holder.parameters
        super().hold({"gradients": {name: each for name, each in given.items() if name not in parts}})
        for name, gradient in given.items():
            if name in parts:
                parts[name].grad = cut_like(parts[name], gradient.to(parts[name].dtype))
        self.holder.hold(saved.get("sharded", {}))
