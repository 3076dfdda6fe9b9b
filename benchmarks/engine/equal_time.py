"""What each method comes to in the same time over a slow link: steps, and the loss on text not trained on.

The methods take turns in slices of a second or a few, so that a busy machine is busy for all. Only slices are on the
clock, which is that of the slower rank; validation is not.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import torch
import torch.distributed as dist

from . import ranks
from .language import GPT, MIDDLE, SMALL, TINY, Corpus, loss_of
from .link import bytes_sent, link
from .methods import Method, make, step
from .race import common_start, elapsed

SLICES = 12
"""How many slices a method's time is cut into, or more where one would take less than a step."""
PIECES = 32
"""Pieces of text in a batch of validation."""


class Runner:
    """One method on its own copy of the model, with its own clock."""

    def __init__(self, name: str, model: torch.nn.Module, corpus: Corpus, settings: dict[str, Any]) -> None:
        self.name = name
        self.model = model
        self.method: Method = make(name, model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
        self.corpus = corpus
        self.batch: int = settings["batch"]
        self.length: int = settings["length"]
        self.steps = 0
        self.seconds = 0.0
        self.sent = 0
        self.curve: list[tuple[float, int, float]] = []
        self.slices: list[tuple[int, float]] = []

    def next_slice(self, budget: float) -> int:
        """Steps that fit into a slice, and into what is left; 0 at the end. Alike on all ranks."""
        period = self.method.period
        if not self.steps:
            return period
        rounds = self.steps / self.seconds / period  # a second
        left = math.floor((budget - self.seconds) * rounds)
        return period * min(left, max(1, round(budget / SLICES * rounds)))

    def play(self, count: int, interface: str | None) -> None:
        """A slice of ``count`` steps."""
        sent = bytes_sent(interface) if interface else 0
        start = common_start()
        for number in range(self.steps, self.steps + count):
            data = self.corpus.batch(number, dist.get_rank(), self.batch, self.length)
            step(self.method, self.optimizer, loss_of, data)
        seconds = elapsed(start)
        self.sent += bytes_sent(interface) - sent if interface else 0
        self.steps += count
        self.seconds += seconds
        self.slices.append((count, seconds))

    @torch.no_grad()
    def validate(self) -> None:
        """The loss now, of rank 0's model, goes on the curve; each rank computes its half."""
        text = self.corpus.validation(2 * PIECES, self.length)[dist.get_rank() :: 2]
        found = loss_of(self.model, text)
        dist.all_reduce(found)
        self.curve.append((self.seconds, self.steps, found.item() / dist.get_world_size()))


def race_for(methods: list[str], budget: float, size: str, batch: int, lr: float) -> dict[str, dict[str, Any]]:
    """Train by each of ``methods`` for ``budget`` seconds; the loss over time, steps, and bytes sent a step.

    Args:
        methods: of `engine.methods`.
        budget: seconds for each.
        size: "small" or "middle", a GPT.
        batch: pieces of text on a rank.
        lr: AdamW's.
    """
    measures = {"small": SMALL, "middle": MIDDLE}[size]
    interface = os.environ.get("BENCHMARK_INTERFACE")
    corpus = Corpus()
    settings = {"batch": batch, "length": measures.context + 1, "lr": lr}
    origin = GPT(measures)
    runners = [Runner(name, copy.deepcopy(origin), corpus, settings) for name in methods]
    for runner in runners:
        runner.validate()
    running = list(runners)
    while running:
        for runner in list(running):
            count = runner.next_slice(budget)
            if count <= 0:
                running.remove(runner)
                continue
            runner.play(count, interface)
            runner.validate()
        running.append(running.pop(0)) if running else None
    return {
        runner.name: {
            "steps": runner.steps,
            "seconds": runner.seconds,
            "sent": runner.sent / runner.steps,
            "curve": runner.curve,
            "slices": runner.slices,
        }
        for runner in runners
    }


def over_the_link(megabits: float, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`race_for` with one rank in each of two namespaces."""
    with link(megabits) as prefix:

        def with_interface(rank: int) -> Any:
            before, variables = prefix(rank)
            return before, {**variables, "BENCHMARK_INTERFACE": variables["GLOO_SOCKET_IFNAME"]}

        found: dict[str, dict[str, Any]] = ranks.run("equal_time:race_for", 2, settings, with_interface)
    return found


def after_steps(methods: list[str], steps: int, size: str, batch: int, lr: float, start: int) -> dict[str, list[float]]:
    """Losses after ``steps`` of SGD with momentum by each of ``methods``: on held-out text, and in the last tenth.

    Args:
        methods: of `engine.methods`.
        steps: of each.
        size: "tiny", "small": a GPT.
        batch: pieces of text on a rank.
        lr: of SGD, whose momentum is 0.9.
        start: plain rounds before PowerSGD.
    """
    measures = {"tiny": TINY, "small": SMALL}[size]
    corpus = Corpus()
    found = {}
    for name in methods:
        model = GPT(measures)
        method = make(name, model, start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        losses = []
        for number in range(steps):
            data = corpus.batch(number, dist.get_rank(), batch, measures.context + 1)
            losses.append(step(method, optimizer, loss_of, data).detach())
        tail = torch.stack(losses[-max(1, steps // 10) :]).mean()
        dist.all_reduce(tail)
        with torch.no_grad():
            held_out = loss_of(model, corpus.validation(128, measures.context + 1))
        found[name] = [held_out.item(), tail.item() / dist.get_world_size()]
    return found
