"""Layers with states besides parameters and buffers (torchmetrics' objects), and layers with a `generate`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lockstep.checkpoint.pretrained import is_of_transformers


def layers_with_states(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that define their own ``_apply`` and have no parameters."""
    for layer in module.modules():
        if type(layer)._apply is not nn.Module._apply and next(layer.parameters(), None) is None:
            yield layer


def bring_states(module: nn.Module, device: torch.device) -> None:
    """Move states to the device that a move of single parameters and buffers has left out."""
    for layer in layers_with_states(module):
        layer.to(device)


def generate_together(module: nn.Module) -> None:
    """Make ``generate`` of transformers' models call the model until the texts of every rank have ended.

    Each call gathers parameters: if a rank stopped at the end of its own texts, the others would wait.
    """
    for layer in module.modules():
        if is_of_transformers(layer):
            vars(layer)["_is_fsdp_managed_module"] = True
