"""Modules whose steps and hooks call a layer of theirs, the whole module, or use a parameter of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.equivalence.models import Plain, cut_by_mesh


class Submodule(Plain):
    """Steps call a layer; so do hooks, between the steps of training and behind those of validation."""

    looks = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 1))
        self.looked = 0.0

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or isinstance(self.net[0].weight, DTensor):
            return
        cut_by_mesh(self.net, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})

    def apply_to(self, x: Tensor) -> Tensor:
        return self.net(x)

    def losses(self, x: Tensor) -> Tensor:
        return (self.apply_to(x).squeeze(1) - x[:, 0]).square()

    def look(self) -> None:
        if self.looks:
            kind = next(self.parameters()).dtype
            with torch.no_grad():
                self.looked += self.apply_to(torch.ones(1, 6, dtype=kind)).item()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.losses(batch[0]).mean())

    def on_validation_epoch_end(self) -> None:
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()


class Forward(Submodule):
    """Steps call the module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def apply_to(self, x: Tensor) -> Tensor:
        return self(x)


class Bare(Submodule):
    """The module has a parameter of its own, too; steps use it, and call a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.7))

    def losses(self, x: Tensor) -> Tensor:
        return super().losses(x * self.scale)
