"""Random generators for a pipeline's blocks, so that, for example, dropout differs between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.ground.device import current_device, device_module

CPU = torch.device("cpu")


class BlockRandom:
    """Storage of random generator states: separate ones for each position in a pipeline, and for each device.

    Code outside the chain uses the process's own generators: the first and the last stage run the same code, and must
    get the same numbers.

    Args:
        devices: devices of this process, by their positions in the pipeline.
    """

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        # seeds follow from the state of torch's generator, which is not advanced
        start = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
        self._devices = {place: sorted({CPU, device}, key=str) for place, device in devices.items()}
        self._states: dict[int, list[Tensor]] = {}
        for place, drawn_on in self._devices.items():
            seed = hashlib.blake2b(start, digest_size=8, salt=place.to_bytes(8, "little")).digest()
            number = int.from_bytes(seed, "little") >> 1  # a generator takes 63 bits
            self._states[place] = [_seeded(device, number) for device in drawn_on]

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Use the generator states of position ``place`` in the pipeline within the context."""
        devices = self._devices[place]
        outside = [_state(device) for device in devices]
        _set(devices, self._states[place])
        try:
            yield
        finally:
            self._states[place] = [_state(device) for device in devices]
            _set(devices, outside)

    def state_dict(self) -> dict[int, list[Tensor]]:
        """Return the generator states for a checkpoint."""
        return dict(self._states)

    def load_state_dict(self, states: Mapping[int, list[Tensor]]) -> None:
        """Load states from :meth:`state_dict`; ignore them if they belong to other positions or device types."""
        sizes = {place: [state.numel() for state in mine] for place, mine in self._states.items()}
        if {place: [state.numel() for state in saved] for place, saved in states.items()} == sizes:
            self._states = dict(states)


def _seeded(device: torch.device, number: int) -> Tensor:
    """Return the state that a device's generator has after it was seeded, and leave its generator as it is."""
    if device.type == "cpu":
        return torch.Generator().manual_seed(number).get_state()
    # Not by torch.Generator(device): torch makes none for a kind of device that is written in Python.
    outside = _state(device)
    try:
        with current_device(device):
            device_module(device).manual_seed(number)
        return _state(device)
    finally:
        _set([device], [outside])


def _state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else device_module(device).get_rng_state(device)
    return state


def _set(devices: list[torch.device], states: list[Tensor]) -> None:
    for device, state in zip(devices, states, strict=True):
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            device_module(device).set_rng_state(state, device)
