"""Observer of the random numbers by which a script without a DataLoader chooses its batches."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from lockstep.extensions.verify.settings import location
from lockstep.extensions.verify.watch import Watch, patch

JOINED = "joined draw"
"""Kind of the event for a draw in which one process uses the numbers of all ranks, one after another."""
_NUMPY = ("randint", "choice", "rand", "randn", "random", "random_sample", "uniform", "normal", "standard_normal")
"""Functions of ``numpy.random`` and its generators that are observed, as far as they exist."""
_GENERATOR = ("integers", *_NUMPY)
_LARGEST = 1_000_000
"""Maximum number of elements of a draw that is saved; more are data, not the choice of a batch."""


class OwnBatches:
    """Recorder and replayer of random numbers that choose a batch, such as ``torch.randint(len(data), (batch_size,))``.

    Ranks save them. One process gets the numbers of all ranks joined along the first dimension, so it makes a batch
    with the samples of all ranks, even though its script draws the batch of one rank. If the script accumulates by the
    number of ranks, one process gets the numbers of one rank after another.

    A draw is identified by the line of the script that makes it, since a rank may evaluate by itself.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._counts: Counter[str] = Counter()  # draws so far, by line
        # a script whose ranks read a loader is fed by that
        self._has_loader = bool(watch.events_of_rank_0("batch"))

    def install(self) -> None:
        """Observe NumPy's global generator, and those that ``default_rng`` and ``random.Random`` create from now on."""
        for name in _NUMPY:
            patch(np.random, name, self._observed(name, getattr(np.random, name)))
        methods = {
            name: self._observed(name, getattr(np.random.Generator, name))
            for name in _GENERATOR
            if hasattr(np.random.Generator, name)
        }
        observed: Any = type("Generator", (np.random.Generator,), methods)
        create, generators = np.random.default_rng, self.watch.generators

        def default_rng(seed: Any = None) -> Any:
            generator = observed(create(seed).bit_generator)
            generators.append(ref(generator))
            return generator

        class ObservedRandom(random.Random):
            def __init__(self, x: Any = None) -> None:
                super().__init__(x)
                generators.append(ref(self))

        patch(np.random, "default_rng", default_rng)
        patch(random, "Random", ObservedRandom)

    def _observed(self, name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def draw_shared(*args: Any, **kwargs: Any) -> Any:
            found = draw(*args, **kwargs)
            if not isinstance(found, np.ndarray) or found.dtype.kind not in "iuf" or not self.is_choice(name):
                return found
            return self.share(name, torch.from_numpy(found)).numpy()

        return draw_shared

    def is_choice(self, name: str) -> bool:
        """Return True if a function's random numbers may choose a batch."""
        watch = self.watch
        if watch.has_iterated_loader or self._has_loader or watch.in_loader or watch.depth or name.endswith("_"):
            return False
        return bool(location())

    def share(self, name: str, result: Tensor) -> Tensor:
        """Save random numbers that a rank has drawn. In a replay by one process, return the ranks' numbers instead."""
        watch, settings = self.watch, self.watch.settings
        is_trained = torch.is_grad_enabled()
        line = f"{location()}-{is_trained}".replace("/", "_").replace(":", "-")
        number = self._counts[line]
        self._counts[line] += 1
        if not settings.is_replay:
            if result.numel() <= _LARGEST:
                torch.save(result.detach().clone(), watch.journal.folder / f"choice-{line}-{number}.pt")
            return result
        folders = settings.feed
        if settings.rank_by_rank and is_trained:
            folders, number = (folders[number % len(folders)],), number // len(folders)
        paths = [Path(folder) / f"choice-{line}-{number}.pt" for folder in folders]
        parts = [torch.load(path) for path in paths if path.exists()]
        joined = _join(name, parts, result)
        if joined is None:
            return result
        if joined.shape != result.shape:
            watch.chunks = tuple(map(len, parts))
        if joined.shape != result.shape or len(folders) < len(settings.feed):
            watch.journal.record_once(JOINED, name=name, where=location())
        return joined.to(result.dtype)


def _join(name: str, parts: list[Tensor], own: Tensor) -> Tensor | None:
    """Join the ranks' random numbers for use in one process. Return None if they are missing or do not fit ``own``."""
    if not parts:
        return None
    if not own.dim() or name == "randperm" or all(torch.equal(part, parts[0]) for part in parts):
        return parts[0] if parts[0].shape == own.shape else None
    return torch.cat(parts) if all(part.shape[1:] == own.shape[1:] for part in parts) else None
