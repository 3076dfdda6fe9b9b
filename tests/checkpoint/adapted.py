"""Modules of which an adapter alone is trained: LoRA by `peft` around models of transformers, and by hand."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import LightningModule
from tests.checkpoint.tuned import CLASSES, CONFIGS, WORDS, Tuned, class_of, needs_transformers

OF_LLAMAS = ["q_proj", "v_proj", "down_proj"]
TARGETS = {"llama": OF_LLAMAS, "deep llama": OF_LLAMAS, "bert": ["query", "value"]}


def needs_peft() -> None:
    """Skips where it is not installed."""
    needs_transformers()
    if importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft")


class Adapted(Tuned):
    """A model of transformers with `peft`'s LoRA: the base comes from a folder, and stays as it is.

    Args:
        folder: of the base.
        kind: of the model.
        dtype: of the base; None: the run's.
    """

    def __init__(self, folder: str, kind: str = "llama", dtype: torch.dtype | None = None) -> None:
        super().__init__(folder, kind)
        self.base_dtype = dtype

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from peft import LoraConfig, get_peft_model

        config = CONFIGS[self.kind]()
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0  # drawn by each rank for itself
        torch.manual_seed(7)
        with torch.device("meta"):
            base = class_of(self.class_name)(config)
        if self.base_dtype is not None:
            base.to(self.base_dtype)
        lockstep.load_pretrained(base, self.folder)
        options = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[self.kind], init_lora_weights="gaussian")
        self.model = get_peft_model(base, options)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


class Lora(nn.Module):
    """A linear layer that is not trained, and two small ones beside it that are."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class ByHand(LightningModule):
    """A chain of blocks with adapters; what is outside of it is frozen, too."""

    def __init__(self, layers: int = 4, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(WORDS, 8).requires_grad_(False)
        self.blocks = nn.Sequential(*[nn.Sequential(Lora(nn.Linear(8, 8)), nn.Tanh()) for _ in range(layers)])
        self.head = nn.Linear(8, WORDS).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.table(batch)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


class CutByHand(ByHand):
    """The same, its adapters cut over the ranks of a second dimension, where there is one."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh is None:  # one process
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for block in self.blocks:
            parallelize_module(block[0], tensor, {"down": ColwiseParallel(), "up": RowwiseParallel()})  # type: ignore[index]
            fully_shard(block, mesh=data)
        fully_shard(self, mesh=data)


__all__ = ["CLASSES", "TARGETS", "Adapted", "ByHand", "CutByHand", "Lora", "needs_peft"]
