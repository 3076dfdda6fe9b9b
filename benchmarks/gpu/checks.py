"""What a part is made of: checks, each with a verdict and numbers, written down as soon as they are known."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import ROOT

Numbers = dict[str, Any]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
ENOUGH = 0.9
"""The share of a part's limit after which it begins no other check."""


class Skip(Exception):
    """A check that this machine cannot make; the message says what is missing."""


class Missed(AssertionError):
    """A number that is not what it is to be; what was measured is kept, also on the way from a rank."""

    def __init__(self, message: str, numbers: Numbers) -> None:
        super().__init__(message)
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.numbers)


@dataclass
class Part:
    """What a part works with.

    Attributes:
        device: torch's name of the device type.
        small: whether this is a trial of the script, with small models and few steps.
        limit: seconds.
        kept: the file for what was found; None keeps it in `found` alone.
        without: libraries that are not compared with.
    """

    device: str = "cuda"
    small: bool = False
    limit: float = 60.0
    kept: Path | None = None
    without: list[str] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    pool: Any = None
    """A `tests.tools.pool.RankPool`, made when ranks are first asked for."""
    begun: float = field(default_factory=time.monotonic)

    def check(self, name: str, function: Callable[..., Numbers | None], *arguments: object) -> None:
        """Calls a function and keeps what it returns or raises; nothing that it raises ends the part."""
        start = time.monotonic()
        told: dict[str, Any] = {"name": name, "result": PASSED}
        if start - self.begun > ENOUGH * self.limit:
            self._keep(told | {"result": FAILED, "said": "not begun: the time of the part was over"})
            return
        try:
            told["numbers"] = function(*arguments) or {}
        except Exception as error:
            print(f"----- {name}", *traceback.format_exception(error), sep="\n", file=sys.stderr, flush=True)
            told |= verdict(error)
        self._keep(told | {"seconds": round(time.monotonic() - start, 3)})

    def has(self, library: str) -> bool:
        """Whether a library is installed and to be compared with."""
        return library not in self.without and find_spec(library) is not None

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.monotonic() - self.begun)

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the processor itself."""
        return self.device == "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether the device is NVIDIA's, which has NCCL."""
        return self.device == "cuda"

    @cached_property
    def count(self) -> int:
        """How many devices there are; one for a CPU."""
        import torch

        return 1 if self.on_cpu else int(torch.get_device_module(self.device).device_count())

    def ranks(self, world: int, function: Callable[..., Any], *arguments: object, group: bool = True) -> list[Any]:
        """What a function returns on each of so many fresh ranks, with a group (gloo's on CPUs and CUDA) or none."""
        if self.pool is None:
            from lockstep.testing.devices import VARIABLE
            from tests.tools.pool import RankPool

            os.environ[VARIABLE] = self.device  # what carries the messages of the ranks' groups depends on it
            self.pool = RankPool(world, ("lockstep.trainer",))
        return list(self.pool.run(function, *arguments, world=world, timeout=max(5.0, self.left - 2), group=group))

    def close(self) -> None:
        """End the ranks."""
        if self.pool is not None:
            self.pool.close()

    def _keep(self, told: dict[str, Any]) -> None:
        self.found.append(told)
        print(f"{told['name']}: {told['result']} {told.get('said', '')} {told.get('numbers', '')}", flush=True)
        if self.kept is not None:
            with open(self.kept, "a") as file:
                file.write(json.dumps(told) + "\n")


def verdict(error: BaseException) -> dict[str, Any]:
    """What an exception says of a check; one on a rank of a pool is the cause of what the pool raises."""
    if not isinstance(error, Skip | Missed) and isinstance(error.__cause__, Skip | Missed):
        error = error.__cause__
    if isinstance(error, Skip):
        return {"result": SKIPPED, "said": str(error)}
    if isinstance(error, Missed):
        return {"result": FAILED, "said": str(error), "numbers": error.numbers}
    return {"result": FAILED, "said": last_words(error)}


def last_words(error: BaseException) -> str:
    """The first line of an error that says something, in at most 300 characters, with files as in the checkout."""
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    return lines[0].replace(f"{ROOT}/", "")[:300] if lines else type(error).__name__


def expect(holds: bool, message: str, numbers: Numbers | None = None) -> None:
    """Refuse what is not as it is to be, and keep the numbers.

    Raises:
        Missed: where it does not hold.
    """
    if not holds:
        raise Missed(message, numbers or {})


def run_part(part: Part, name: str) -> list[dict[str, Any]]:
    """All checks of a part."""
    try:
        importlib.import_module(f"benchmarks.gpu.parts.{name}").run(part)
    finally:
        part.close()
    return part.found
