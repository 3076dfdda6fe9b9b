"""The seed of a run, and the states of all global random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, SupportsInt

import torch

from lockstep.ground.device import accelerator_kinds, device_module, devices_of
from lockstep.ground.rank import log, rank_prefixed_message, rank_zero_only, rank_zero_warn

LARGEST_SEED = 2**32 - 1
"""What numpy's legacy generator takes at most."""

_current: int | None = None


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed torch (all devices), numpy's legacy generator and Python's `random`.

    Args:
        seed: 0 to 2**32 - 1. None: the seed that was set before or that the launching process handed down,
            else 0.
        workers: taken for scripts written for Lightning, and not needed: lockstep seeds the randomness of a
            data set from (seed, epoch, position), in loader workers too.
        verbose: say the seed, on every rank.

    Returns:
        the seed.

    Raises:
        ValueError: the seed is no integer or out of bounds.
    """
    global _current
    if seed is None:
        if _current is None and verbose:
            rank_zero_warn("seed_everything() got no seed and none was set before: taking 0", stacklevel=2)
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
    """The seed that `seed_everything` set last in this process, or that was handed down to it, or None."""
    return _current


def hand_down_seed(seed: int | None) -> None:
    """Make ``seed`` the `current_seed` of a started process, without touching any generator.

    Raises:
        ValueError: the seed is no integer or out of bounds.
    """
    global _current
    _current = None if seed is None else _checked(seed)


def random_states(include_cuda: bool = True) -> dict[str, Any]:
    """The states of torch's, the accelerator's, numpy's and Python's global generators.

    Made of dicts, tensors, numbers and None only, so that ``torch.load(weights_only=True)`` reads them back;
    `set_random_states` restores them bit for bit. An accelerator's are there if this process has used it, under its
    name ("cuda"), by the numbers that its devices have in this process: what goes to another process, or into a
    checkpoint, takes `random_states_of`.

    Args:
        include_cuda: the accelerator's, too, whichever it is.
    """
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
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
    """Put back what `random_states` returned.

    A generator that is missing in ``states``, or here, is left as it is; an accelerator's are put back as far as there
    are devices.
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
    """As `random_states`, for a process that may give its devices other numbers.

    Args:
        devices: that a rank works with; of each accelerator among them there is the state, in their order.
    """
    states = random_states(include_cuda=False)
    own = [device for device in devices if device.type != "cpu"]
    if own:
        states["devices"] = [device_module(device).get_rng_state(device) for device in own]
    return states


def set_random_states_of(states: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Put back what `random_states_of` returned, the state of each device into the one in its place.

    Checkpoints of earlier versions have CUDA's states by number; a device takes that of its own number.

    Args:
        states: of this process or another one.
        devices: that this rank works with.
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
    """Random states are on leaving what they were on entering, also after an exception.

    Args:
        include_cuda: the accelerator's, too. False in a forked process, which may not touch CUDA.
    """
    states = random_states(include_cuda)
    try:
        yield
    finally:
        set_random_states(states)


def forked_random_numbers(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn that will be drawn again: of the CPU and of devices, all of one type."""
    gpus = sorted({device for device in devices if device.type != "cpu"}, key=str)
    return torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cpu")


def _checked(seed: SupportsInt | str) -> int:
    try:
        number = int(seed)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= LARGEST_SEED:
        raise ValueError(f"seed={seed!r}: give an integer from 0 to {LARGEST_SEED} (2**32 - 1)")
    return number


def _numpy() -> Any:
    """numpy, or None where it is not installed (torch runs without)."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
