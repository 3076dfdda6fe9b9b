"""Several ranks on one card, for tests on a machine that has no second one."""

from __future__ import annotations

import torch

from lockstep.ground.accelerators import CUDAAccelerator, Devices
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing import host_group

host_group.register()  # also in a process that was started for a rank, and gets the accelerator by pickle


class SharedCard(CUDAAccelerator):
    """One CUDA device for all ranks: each has a process and a context of its own, and they take turns on the card.

    For tests only: nothing is won by it, and weights, gradients and optimizer states lie on the card once for each
    rank. NCCL wants a card for each rank, so messages travel by way of the host (`lockstep.testing.host_group`).
    Another backend is taken where the strategy names one: ``DDPStrategy(process_group_backend=...)``.

    Args:
        number: of the card.

    Example:
        >>> from lockstep import Trainer
        >>> trainer = Trainer(accelerator=SharedCard(), devices=2, strategy="ddp")  # doctest: +SKIP
    """

    process_group_backend = host_group.BACKENDS

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """The card, once for each rank; ``"auto"``: for one."""
        count = 1 if devices == "auto" else devices
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise MisconfigurationException(
                f"devices={devices!r} with SharedCard(): give the number of ranks, 1 or more"
            )
        return [torch.device("cuda", self.number)] * count
