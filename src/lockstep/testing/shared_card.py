"""An accelerator that runs several ranks on one GPU, for tests on machines with a single GPU."""

from __future__ import annotations

import torch

from lockstep.ground.accelerators import CUDAAccelerator, Devices
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing import host_group

# At import, since a spawned rank receives the accelerator by pickle, which imports only this file.
host_group.register()


class SharedCard(CUDAAccelerator):
    """An accelerator in which all ranks share one CUDA device, each in its own process.

    For tests only: ranks are not faster than one process, and the card holds the weights, gradients and optimizer
    states of all ranks. NCCL needs a card for each rank, so messages are sent through the host
    (`lockstep.testing.host_group`), unless the strategy names a backend: ``DDPStrategy(process_group_backend=...)``.

    Args:
        number: index of the card.

    Example:
        >>> from lockstep import Trainer
        >>> trainer = Trainer(accelerator=SharedCard(), devices=2, strategy="ddp")  # doctest: +SKIP
    """

    process_group_backend = host_group.BACKENDS

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """Return a list with the same device for each rank; ``"auto"`` means one rank."""
        count = 1 if devices == "auto" else devices
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise MisconfigurationException(
                f"devices={devices!r} with SharedCard(): the number of ranks must be an int of at least 1"
            )
        return [torch.device("cuda", self.number)] * count
