"""Compiled steps of a Trainer beside those of a loop by hand with ``torch.compile``: pair by pair, inside one fit."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .race import task
from .sharded import Loop, raced, shard_by_hand

KINDS = ("whole", "blocks", "ddp", "fsdp")
"""One process whose model, or whose blocks, are compiled; two ranks and their blocks, by each strategy."""


def by_hand(kind: str, model: str) -> Loop:
    """The same, by torch's functions alone: the model or its blocks compiled, DDP or ``fully_shard``, AdamW."""
    made, loss, batch = task(model)
    return Loop(_compiled(kind, made), loss, batch)


def _compiled(kind: str, model: nn.Module) -> nn.Module:
    if kind == "whole":
        model.compile()
        return model
    blocks: Any = model.blocks
    for block in blocks:
        block.compile()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        shard_by_hand(model, blocks, again=True)
    return model


def race(kind: str, model: str, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, of the slower rank: by the clock, and of the processor in all threads.

    Args:
        kind: one of `KINDS`.
        model: name of a task of `engine.race`.
        rounds, warmup: pairs, and pairs before, in which all is compiled.
    """
    strategy = kind if kind in ("ddp", "fsdp") else "auto"
    return raced(model, by_hand(kind, model), rounds, warmup, strategy=strategy, compile={"blocks": kind != "whole"})
