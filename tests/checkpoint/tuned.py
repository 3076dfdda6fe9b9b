"""Modules around models of transformers, made of small configs, for the tests of `load_pretrained`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import LightningModule

WORDS = 48


def needs_transformers() -> None:
    """Skips where it is not installed."""
    for package in ("transformers", "safetensors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def config_of(name: str, **sizes: Any) -> Callable[..., Any]:
    """Makes a config of a class of transformers, of a small model."""

    def made(**others: Any) -> Any:
        return class_of(name)(**{"vocab_size": WORDS, **sizes, **others})

    return made


SIZES = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
llama = config_of("LlamaConfig", **SIZES, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "deep llama": partial(llama, num_hidden_layers=4),  # a layer for each of four stages
    "bert": config_of("BertConfig", **SIZES, num_attention_heads=2, max_position_embeddings=32),
    "gpt2": config_of("GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=32),  # with tied weights
    "mixtral": config_of("MixtralConfig", **{**SIZES, **EXPERTS}),  # experts are one tensor, and several in the folder
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "deep llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
}


def class_of(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def write_folder(folder: Path, kind: str, seed: int = 1, max_shard_size: str = "12KB", **others: Any) -> Path:
    """A folder as `save_pretrained` writes it, in parts."""
    torch.manual_seed(seed)
    return write_model(class_of(CLASSES[kind])(CONFIGS[kind]()), folder, max_shard_size, **others)


def write_model(model: Any, folder: Path, max_shard_size: str = "12KB", dtype: torch.dtype = torch.float32) -> Path:
    with torch.no_grad():  # norms and biases begin alike, which would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


class Tuned(LightningModule):
    """A model of transformers that is made on the meta device, and begins with a folder's weights."""

    def __init__(self, folder: str, kind: str, model: str = "") -> None:
        super().__init__()
        self.folder, self.kind, self.class_name = folder, kind, model or CLASSES[kind]
        self.model: nn.Module | None = None
        self.seen: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(7)
        with torch.device("meta"):
            self.model = self.built()
        lockstep.load_pretrained(self.model, self.folder)

    def built(self) -> Any:
        return class_of(self.class_name)(CONFIGS[self.kind]())

    def on_fit_start(self) -> None:
        strategy = self.trainer.strategy
        self.seen = {name: value.detach().clone().cpu() for name, value, _ in strategy.whole_parameters()}
        self.seen |= {name: value.detach().clone().cpu() for name, value in self.named_buffers()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        logits = self.model(input_ids=batch).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def texts(count: int = 8) -> Any:
    words = torch.randint(0, WORDS, (count, 6), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(words, batch_size=4)  # type: ignore[arg-type]
