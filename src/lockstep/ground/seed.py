"""The seed of a run, and the states of all global random number generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, SupportsInt

import torch

from lockstep.ground.device import accelerator_kinds, device_module, devices_of
from lockstep.ground.rank import log, rank_prefixed_message, rank_zero_only, rank_zero_warn

LARGEST_SEED = 2**32 - 1
"""The largest seed that numpy's legacy generator accepts."""

_current: int | None = None


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed torch (all devices), numpy's legacy generator and Python's `random`.

    Args:
        seed: 0 to 2**32 - 1. None: the seed that was set before or passed on by the launching process, else 0.
        workers: accepted for scripts written for Lightning, and ignored: lockstep seeds the randomness of a
            data set from (seed, epoch, position), in loader workers too.
        verbose: log the seed on every rank.

    Returns:
        The seed.

    Raises:
        ValueError: the seed is not an integer or is out of bounds.

    Example::

        seed_everything(42)
        model = Net()  # the same initial weights in every run
    """
    global _current
    if seed is None:
        if _current is None and verbose:
            rank_zero_warn(
                "seed_everything() was called without a seed, and none was set earlier: the seed is 0", stacklevel=2
            )
        seed = _current or 0
    seed = _checked(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    _current = seed
    if verbose:
        log.info(rank_prefixed_message(f"seed set to {seed}", rank_zero_only.rank))
    return seed


def current_seed() -> int | None:
    """Return the seed that `seed_everything` set last, or that the launching process passed on; None if unset."""
    return _current


def hand_down_seed(seed: int | None) -> None:
    """In a process that was just started, set the seed that `current_seed` returns. No generator is seeded.

    Raises:
        ValueError: the seed is not an integer or is out of bounds.
    """
    global _current
    _current = None if seed is None else _checked(seed)


def random_states(include_cuda: bool = True) -> dict[str, Any]:
    """Return the states of all global random generators: torch's, the accelerator's, numpy's and Python's.

    They consist of dicts, tensors, numbers and None only, so ``torch.load(weights_only=True)`` can read them, and
    `set_random_states` restores them bit for bit. The accelerator's states are included if this process has used it,
    under its name ("cuda"), by the indices of its devices in this process. For another process, or a checkpoint, use
    `random_states_of`.

    Args:
        include_cuda: include the states of the accelerator, whichever it is.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Tensors and numbers only: torch.load(weights_only=True) reads nothing else.
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    numpy = _numpy()
    if numpy is not None:
        _, keys, position, has_gauss, cached_gauss = numpy.random.get_state(legacy=True)
        states["numpy"] = {
            "words": torch.from_numpy(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached_gauss),
        }
    if include_cuda:
        for kind in accelerator_kinds():
            devices = devices_of(kind, started=True)
            if devices:
                states[kind] = [device_module(kind).get_rng_state(device) for device in devices]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that `random_states` returned.

    A generator that is missing in ``states``, or in this process, is left as it is. States of an accelerator are
    restored for as many devices as exist.
    """
    torch.set_rng_state(states["torch"].cpu())
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = _numpy()
    if numpy is not None and "numpy" in states:
        saved = states["numpy"]
        words = saved["words"].cpu().numpy().astype("uint32")
        numpy.random.set_state(("MT19937", words, saved["position"], saved["has_gauss"], saved["cached_gauss"]))
    for kind in accelerator_kinds():
        if kind in states:
            for device, state in zip(devices_of(kind), states[kind], strict=False):
                device_module(kind).set_rng_state(state.cpu(), device)


def random_states_of(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return this process's random states in a form that a process with other device indices can restore.

    Args:
        devices: the devices of a rank; the state of each accelerator among them is included, in their order.
    """
    states = random_states(include_cuda=False)
    own = [device for device in devices if device.type != "cpu"]
    if own:
        states["devices"] = [device_module(device).get_rng_state(device) for device in own]
    return states


def set_random_states_of(states: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the states that `random_states_of` returned. Devices are matched by their order.

    Checkpoints of earlier versions have CUDA's states by index; each device gets the state of its own index.

    Args:
        states: from this process or another one.
        devices: the devices of this rank.
    """
    set_random_states({name: states[name] for name in ("torch", "python", "numpy") if name in states})
    own = [device for device in devices if device.type != "cpu"]
    if "devices" in states:
        saved = dict(zip(own, states["devices"], strict=False))
    else:
        by_number = states.get("cuda", [])
        saved = {device: by_number[device.index or 0] for device in own if (device.index or 0) < len(by_number)}
    for device, state in saved.items():
        device_module(device).set_rng_state(state.cpu(), device)


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """At the end of the block (also after an exception), reset all random states to those at its start.

    Args:
        include_cuda: include the accelerator's. False in a forked process, which must not use CUDA.
    """
    states = random_states(include_cuda)
    try:
        yield
    finally:
        set_random_states(states)


def forked_random_numbers(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Return a context that, on exit, restores the random states of the CPU and of the accelerators in ``devices``.

    The accelerators must be of one type.
    """
    gpus = sorted({device for device in devices if device.type != "cpu"}, key=str)
    return torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cpu")


def _checked(seed: SupportsInt | str) -> int:
    try:
        number = int(seed)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= LARGEST_SEED:
        raise ValueError(f"seed={seed!r} is not valid: pass an integer from 0 to {LARGEST_SEED} (2**32 - 1)")
    return number


def _numpy() -> Any:
    """Return the module numpy, or None if numpy is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
