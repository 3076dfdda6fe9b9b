"""The support matrix of 2019, printed into docs; tests/config/test_support_matrix.py runs each row on CPU devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        command: as it was typed in 2019, with k for the number of GPUs.
        flags: today's, for CPU devices.
        old: those of 2019, for two GPUs or one.
        ranks: processes that train.
        devices: devices that train.
    """

    command: str
    flags: dict[str, Any]
    old: dict[str, Any]
    ranks: int
    devices: int

    def cells(self) -> list[str]:
        """1 GPU, several GPUs, dp, ddp, 16-bit, command."""
        strategy = self.flags.get("strategy")
        columns = [self.devices == 1, self.devices > 1, strategy == "dp", strategy == "ddp", "precision" in self.flags]
        return [*("Y" if column else "" for column in columns), f"`{self.command}`"]


HALF = {"precision": "bf16-mixed"}
ROWS = [
    Row("Trainer(gpus=1)", {"devices": 1}, {"gpus": 1}, 1, 1),
    Row("Trainer(gpus=1, use_amp=True)", {"devices": 1, **HALF}, {"gpus": 1, "use_amp": True}, 1, 1),
    Row(
        "Trainer(gpus=k, distributed_backend='dp')",
        {"devices": 2, "strategy": "dp"},
        {"gpus": 2, "distributed_backend": "dp"},
        1,
        2,
    ),
    Row(
        "Trainer(gpus=k, distributed_backend='ddp')",
        {"devices": 2, "strategy": "ddp"},
        {"gpus": 2, "distributed_backend": "ddp"},
        2,
        2,
    ),
    Row(
        "Trainer(gpus=k, distributed_backend='ddp', use_amp=True)",
        {"devices": 2, "strategy": "ddp", **HALF},
        {"gpus": 2, "distributed_backend": "ddp", "use_amp": True},
        2,
        2,
    ),
    Row(
        "Trainer(gpus=k, distributed_backend='dp', use_amp=True)",
        {"devices": 2, "strategy": "dp", **HALF},
        {"gpus": 2, "distributed_backend": "dp", "use_amp": True},
        1,
        2,
    ),
]


def lines() -> list[str]:
    """The matrix in Markdown."""
    head = ["1 GPU", "k GPUs", "dp", "ddp", "16-bit", "in 2019"]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *(row.cells() for row in ROWS))]
