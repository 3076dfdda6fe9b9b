"""Random numbers of the made-up device: a seed and a counter for each device number, as CUDA has them.

Each operator that draws gets a generator of its own, made of the seed and the counter at the time of the call; so the
numbers depend on the order of the calls, and not on when a queue comes to them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tests.accelerator.madeup.settings import settings


class Generator:
    """Of one device."""

    def __init__(self) -> None:
        self.seed = torch.Generator().seed() >> 1  # random, as CUDA's are
        self.drawn = 0

    def manual_seed(self, seed: int) -> None:
        """Begin anew."""
        self.seed, self.drawn = seed % 2**63, 0

    def next(self) -> torch.Generator:
        """For the next operator that draws."""
        digest = hashlib.blake2b(f"{self.seed} {self.drawn}".encode(), digest_size=8).digest()
        self.drawn += 1
        made = torch.Generator()
        made.manual_seed(int.from_bytes(digest, "big") >> 1)
        return made

    def get_state(self) -> Tensor:
        """16 bytes."""
        return torch.tensor([self.seed, self.drawn], dtype=torch.int64, device="cpu").view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        """What `get_state` gave."""
        if state.device.type != "cpu" or state.dtype != torch.uint8 or state.numel() != 16:
            raise TypeError("RNG state must be a torch.ByteTensor of 16 bytes")
        self.seed, self.drawn = state.clone().view(torch.int64).tolist()


generators = [Generator() for _ in range(settings.count)]
