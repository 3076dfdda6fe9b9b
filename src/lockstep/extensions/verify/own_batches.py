"""Observer of the batches of a script without a DataLoader, which it draws by random numbers or cuts from tensors."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from lockstep.extensions.verify.settings import is_user_code, location
from lockstep.extensions.verify.watch import WHOLE, Watch, patch

JOINED = "joined batch"
"""Kind of the event for a draw or cut in which one process uses those of all ranks, one after another."""
ORDERS = "other order"
"""Kind of the event for a permutation of the whole data that differs between ranks."""
SAME_CHOICE = "same choice"
"""Kind of the event for random numbers that are the same on all ranks, where one process draws more."""
PART = "part of order"
"""Kind of the event for the part of a permutation that a rank takes."""
_ARRAYS = {"tensor", "as_tensor", "from_numpy"}
_CUTS = {"__getitem__", "index_select", "narrow", "split", "chunk", "stack", "cat", "view", "reshape", *_ARRAYS}
"""Functions that cut a batch from data, or make one of pieces that the script has cut."""
_SAME = {"unsqueeze", "to", "long", "float"}
"""Functions whose result is the same piece."""
_CALLED = (torch._tensor, torch.overrides, torch.functional, torch.utils.data.dataset)
_CALLED_FILES = {module.__file__ for module in _CALLED}
"""Files whose code cuts for the line of the script that calls it."""
OWN_CUTS = "own cuts"
"""Override that makes one process keep what it cuts, as ranks with parts of a model cut parameters."""
_MOST, _LARGEST = 2000, 4_000_000
"""Maximum number of batches that are saved by place, and of their elements; more are the data set."""


class OwnBatches:
    """Recorder and replayer of batches without a loader, such as ``data[torch.randint(len(data), (8,))]``.

    Ranks save the random numbers that they draw, and the rows that they cut from a tensor or convert from an array. One
    process gets those of all ranks, joined along the first dimension, even though its script makes the batch of one
    rank. If the script accumulates by the number of ranks, one process gets those of one rank after another.

    A tensor from which a rank cuts smaller pieces, such as its share of the data, is rank 0's. So the process makes as
    many pieces as a rank, and only the pieces are joined. Nothing here proves that the process trains on the samples of
    the ranks: the gradients have to show it.

    A draw or cut is identified by the place in the code that makes it, since a rank may evaluate by itself.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._counts: Counter[str] = Counter()  # draws and cuts so far, by place
        # a script whose ranks read a loader for training is fed by that
        self._has_loader = any(event["grad"] for event in watch.events_of_rank_0("batch"))

    def install(self) -> None:
        """Observe arrays that become tensors, and the generators that ``default_rng`` and ``random.Random`` create."""
        observed: Any = type("Generator", (np.random.Generator,), {})  # other than NumPy's, it has weak references
        create, generators, from_numpy = np.random.default_rng, self.watch.generators, torch.from_numpy

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
        # the mode of functions.py does not see this function
        patch(torch, "from_numpy", lambda array: self.cut("from_numpy", (array,), {}, from_numpy(array)))

    @property
    def _is_fed_by_loader(self) -> bool:
        return self.watch.has_iterated_loader or self._has_loader or self.watch.in_loader

    def is_choice(self, name: str) -> bool:
        """Return True if a function's random numbers may choose a batch."""
        return not (self._is_fed_by_loader or self.watch.depth or name.endswith("_")) and bool(location())

    def draw(self, name: str, result: Tensor) -> Tensor:
        """Save random numbers that a rank has drawn. In a replay by one process, return the ranks' numbers instead."""
        return self._share(name, f"{name}-{location()}-{torch.is_grad_enabled()}", [result])[0]

    def cut(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
        """Save the rows that a rank has cut for training. In a replay by one process, return the ranks' rows instead.

        Args:
            name: name of the function that has cut them.
            args: its arguments.
            kwargs: its keyword arguments.
            result: what it returns: a tensor, or several.
        """
        watch = self.watch
        if self._is_fed_by_loader or watch.depth or watch.is_done or not args or OWN_CUTS in watch.settings.overrides:
            return result
        if name in _SAME and args[0] in watch.made:
            watch.made[result] = watch.made[args[0]]
        if name not in _CUTS or not torch.is_grad_enabled():
            return result
        found = [result] if isinstance(result, Tensor) else list(result)
        sources = self._sources(name, args, kwargs, found[0])
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename in _CALLED_FILES:
            frame = frame.f_back
        if sources is None or frame is None or not is_user_code(frame.f_code.co_filename):
            return result
        if name == "__getitem__" and sources and "choice-randperm" in str(watch.made.get(sources[0])):
            watch.journal.record_once(PART, key=str(args[1]))
        watch.withdraw(sources, is_whole=True)
        shared = self._share(name, f"{location(frame)}-{frame.f_lasti}", found)
        return shared[0] if isinstance(result, Tensor) else tuple(shared)

    def _sources(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], made: Tensor) -> Sequence[Any] | None:
        """Return the tensors that a call cuts, or that it puts together. Return None if it makes no rows."""
        first = args[0] if args else None
        if name in _ARRAYS:
            return () if isinstance(first, np.ndarray) and made.dim() else None
        at = 1 if name in ("stack", "cat", "narrow", "index_select") else 2
        dim = kwargs.get("dim", args[at] if len(args) > at else 0)
        if name in ("stack", "cat"):
            is_cut = dim == 0 and isinstance(first, list | tuple) and any(each in self.watch.made for each in first)
            return first if is_cut and not made.requires_grad else None
        if type(first) is not Tensor or first.requires_grad:
            return None
        if name in ("view", "reshape"):
            return (first,) if first in self.watch.made and first.dim() == 1 < made.dim() else None
        if name == "__getitem__":
            key = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if isinstance(key, slice):
                return None if key.start is key.stop is key.step is None else (first,)
            return () if isinstance(key, list | np.ndarray) or (isinstance(key, Tensor) and key.dim()) else None
        return (first,) if dim == 0 else None

    def _share(self, name: str, place: str, results: list[Tensor]) -> list[Tensor]:
        """Save what a rank has drawn or cut at a place, or return what the ranks have drawn or cut there instead."""
        watch, settings = self.watch, self.watch.settings
        place = place.replace("/", "_").replace(":", "-")
        number = self._counts[place]
        self._counts[place] += 1
        found = []
        for at, result in enumerate(results):
            paths = watch.files(f"choice-{place}-{{}}-{at}.pt", number, torch.is_grad_enabled())
            if settings.is_replay:
                result = self._replay(name, paths, result)
            elif number < _MOST and result.numel() <= _LARGEST:
                torch.save(result.detach().clone(), paths[0])
            watch.made[result] = None if settings.is_replay else paths[0]
            found.append(result)
        return found

    def _replay(self, name: str, paths: Sequence[Path], own: Tensor) -> Tensor:
        """Return what the ranks have saved, joined; or ``own`` if that is missing, or the same on all ranks."""
        watch = self.watch
        is_whole = not any(path.exists() for path in paths)
        if is_whole:
            paths = [path.with_name(f"{WHOLE}-{path.name}") for path in paths]
        parts = [torch.load(path) for path in paths if path.exists()]
        is_same = len(parts) > 1 and all(torch.equal(part, parts[0]) for part in parts)
        if not parts or any(part.shape[1:] != own.shape[1:] for part in parts) or (is_same and name in _CUTS):
            return own
        if name == "randperm" and len(parts) > 1 and not is_same and parts[0].shape == own.shape:
            watch.journal.record_once(ORDERS, name=name, where=location())
        if is_same and own.numel() > parts[0].numel():
            watch.journal.record_once(SAME_CHOICE, where=location())
        if is_whole or not own.dim() or is_same or name == "randperm":
            return parts[0].to(own.dtype) if is_whole or parts[0].shape == own.shape else own
        joined = torch.cat(parts).to(own.dtype)
        watch.chunks = tuple(map(len, parts))
        watch.journal.record_once(JOINED, name=name, where=location(), grows=joined.shape != own.shape)
        return joined
