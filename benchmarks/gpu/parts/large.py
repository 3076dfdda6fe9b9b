"""Steps of a model of 1.2 billion parameters, compiled: by hand, by Trainers, and in shards of one rank."""

from __future__ import annotations

from benchmarks.gpu.checks import Part
from benchmarks.gpu.models import Llama, Shape, language_loss
from benchmarks.gpu.parts.speed import IN_SHARDS_TOO, Case, adamw, each_measured, sized, tokens_of

SECONDS = 150.0
"""Of the part, for which the case's own are made: each of its models is compiled."""


def run(part: Part) -> None:
    """Its one case."""
    each_measured(part, [sized(llama(part.device, part.small), part.small, part.limit / SECONDS)])


def llama(device: str, small: bool) -> Case:
    """Of Llama's shape, in bf16."""
    shape, count = (Shape(64, 2, 4, 2, 128, 256, 32), 2) if small else (Shape(), 4)
    return Case(
        "Llama-shaped 1.2B, compiled",
        lambda: Llama(shape).bfloat16(),
        tokens_of(device, shape.tokens, count, shape.context),
        language_loss,
        adamw,
        "tokens",
        count * shape.context,
        "bf16-true",
        ways=IN_SHARDS_TOO,
        compiled=True,
        seconds=40,
    )
