"""Layers that keep tensors beside parameters and buffers, as torchmetrics' objects do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def layers_with_states(module: nn.Module) -> Iterator[nn.Module]:
    """Those that say themselves what of them is moved, and have no parameters."""
    for layer in module.modules():
        if type(layer)._apply is not nn.Module._apply and next(layer.parameters(), None) is None:
            yield layer


def bring_states(module: nn.Module, device: torch.device) -> None:
    """Bring to the device what parameters and buffers that were moved one by one have left behind."""
    for layer in layers_with_states(module):
        layer.to(device)
