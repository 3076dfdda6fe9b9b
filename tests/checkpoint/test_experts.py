"""LoRA on the experts of a mixture (peft's ``target_parameters``), whose forward parametrizes them for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lockstep
from lockstep import LightningModule
from tests.checkpoint.adapted import needs_peft
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

SIZES = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_local_experts": 2}


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


class Experts(LightningModule):
    """Trains an adapter of both matrices of each expert, and of the attention."""

    def __init__(self, folder: str, loads: bool) -> None:
        super().__init__()
        self.folder, self.loads = folder, loads
        self.model: Any = None

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if self.model is not None:
            return
        if self.loads:
            with torch.device("meta"):
                self.model = mixtral()
            lockstep.load_pretrained(self.model, self.folder)
        else:
            self.model = type(mixtral()).from_pretrained(self.folder, dtype=torch.float64).train()
            self.model.config._experts_implementation = "eager"
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
        self.model = get_peft_model(self.model, config)

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.5)


def adapter(folder: str, loads: bool, strategy: str) -> dict[str, Tensor]:
    """What a fit has made of the adapter."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(5)
    trainer = quiet(strategy=strategy, devices=world, max_epochs=2, precision="64-true")
    texts: Any = torch.arange(60).reshape(12, 5) ** 2 % 20
    trainer.fit(Experts(folder, loads), DataLoader(texts, 4 // world))
    return {name: value.cpu().clone() for name, value, _ in trainer.strategy.whole_parameters() if "lora_" in name}


@pytest.mark.parametrize("loads", [False, True], ids=["from_pretrained", "load_pretrained"])
def test_an_adapter_of_experts_is_trained_as_by_one_process(ranks: RankPool, loads: bool, tmp_path: Path) -> None:
    needs_peft()
    torch.manual_seed(1)
    folder = str(tmp_path / "base")
    mixtral().double().save_pretrained(folder)
    expected = adapter(folder, loads, "auto")
    assert len(expected) == 2 * (2 * 2 + 2)
    assert all(bool(value.any()) for value in expected.values())  # also what begins with zeros
    for strategy in ("ddp", "fsdp"):
        for found in ranks(2).run(adapter, folder, loads, strategy, timeout=60):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
