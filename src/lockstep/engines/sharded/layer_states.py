"""Layers that hold more than parameters and buffers (torchmetrics' objects), or call themselves again (`generate`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lockstep.checkpoint.pretrained import is_of_transformers


def layers_with_states(module: nn.Module) -> Iterator[nn.Module]:
    """Those that say themselves what of them is moved, and have no parameters."""
    for layer in module.modules():
        if type(layer)._apply is not nn.Module._apply and next(layer.parameters(), None) is None:
            yield layer


def bring_states(module: nn.Module, device: torch.device) -> None:
    """Bring to the device what parameters and buffers that were moved one by one have left behind."""
    for layer in layers_with_states(module):
        layer.to(device)


def generate_together(module: nn.Module) -> None:
    """Let ``generate`` of transformers' models call the model on every rank until the last rank's texts have ended.

    Each call gathers parameters: a rank that stopped when its own texts have ended would leave the others waiting.
    """
    for layer in module.modules():
        if is_of_transformers(layer):
            vars(layer)["_is_fsdp_managed_module"] = True
