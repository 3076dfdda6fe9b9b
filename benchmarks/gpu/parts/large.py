"""Steps of a model of 1.2 billion parameters, compiled: by hand, by Trainers, and in shards of one rank."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.checks import Part
from benchmarks.gpu.models import Llama, Shape, language_loss
from benchmarks.gpu.parts.speed import Case, adamw, each_measured, sized, tokens_of
from benchmarks.gpu.ways import HAND, LIGHTNING, SHARDED, TRAINER, TRAINER_SHARDED

SECONDS = 150.0
"""Of the part, for which the cases' own are made: each of their models is compiled."""


def run(part: Part) -> None:
    """One check for the loop and the Trainers, then one for shards, so that the first is kept if time runs out."""
    each_measured(part, [sized(case, part.small, part.limit / SECONDS) for case in llama(part.device, part.small)])


def llama(device: str, small: bool) -> list[Case]:
    """Of Llama's shape, in bf16."""
    shape, count = (Shape(64, 2, 4, 2, 128, 256, 32), 2) if small else (Shape(), 4)
    plain = Case(
        "Llama-shaped 1.2B, compiled",
        lambda: Llama(shape).bfloat16(),
        tokens_of(device, shape.tokens, count, shape.context),
        language_loss,
        adamw,
        "tokens",
        count * shape.context,
        "bf16-true",
        ways=(HAND, TRAINER, LIGHTNING),
        compiled="blocks",
        seconds=20,
    )
    return [plain, replace(plain, name="Llama-shaped 1.2B, compiled, fsdp", ways=(SHARDED, TRAINER_SHARDED))]
