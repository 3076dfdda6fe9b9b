"""Gradients of which each rank has its shard, beside whole ones that wait for a reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.engines.gradients import Gradients
from lockstep.ground.parameters import local_part

if TYPE_CHECKING:
    from lockstep.engines.sharded.fully_shard import ShardedModule  # noqa: F401  # named below, in a string


class ShardedGradients(Gradients["ShardedModule"]):
    """Of a module whose parameters are shards, but for some that are whole."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """This rank's shards, and whole ones that wait for a reduction."""
        found = [*super().local(stepped), *([] if stepped else self.holder.gathered()[1])]
        return list({id(gradient): local_part(gradient) for gradient in found}.values())

    def held(self) -> dict[str, Any]:
        """Those of parameters that are whole, and what each rank has to itself of the others, as ``"sharded"``."""
        named, shards = self.engine.named_parameters(), self.holder
        whole = {name: p.grad for name, p in named.items() if name not in shards.parameters and p.grad is not None}
        return {"gradients": {n: each.detach().cpu().clone() for n, each in whole.items()}, "sharded": shards.held()}

    def hold(self, saved: dict[str, Any]) -> None:
        """Take this rank's part of gradients that come whole."""
        from lockstep.engines.sharded.fully_shard import cut_like

        given, parts = saved.get("gradients", {}), self.holder.parameters
        super().hold({"gradients": {name: each for name, each in given.items() if name not in parts}})
        for name, gradient in given.items():
            if name in parts:
                parts[name].grad = cut_like(parts[name], gradient.to(parts[name].dtype))
        self.holder.hold(saved.get("sharded", {}))
