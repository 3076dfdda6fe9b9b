"""Caches of keys and values in recomputed layers: each call of a layer would append to them once more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.memory.recompute import recompute
from tests.checkpoint.adapted import needs_peft
from tests.loop.pieces import quiet
from tests.memory.test_recompute import STRATEGIES
from tests.tools.pool import RankPool

pytestmark = pytest.mark.usefixtures("needs")


@pytest.fixture(name="needs")
def _needs() -> None:
    needs_peft()


SIZES = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2))


def gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=4, sliding_window=4, layer_types=kinds)
    )


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, int] = {"vocab_size": 20, "d_model": 8, "num_mel_bins": 4, "max_source_positions": 8}
    sizes |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {f"{side}_ffn_dim": 8 for side in ("encoder", "decoder")}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **ends))


def with_a_prefix() -> Any:
    """A model whose cache is full when its layers begin: keys and values that are trained."""
    from peft import PrefixTuningConfig, get_peft_model

    return get_peft_model(llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of padded texts, dropout included."""
    ids = torch.arange(24).reshape(3, 8) % 20
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    texts = {"input_ids": ids, "attention_mask": mask}
    sounds = {"input_features": torch.linspace(-1, 1, 3 * 4 * 16, dtype=torch.float64).reshape(3, 4, 16)}
    torch.manual_seed(1)
    given = sounds if "Whisper" in type(model).__name__ else texts
    model(**given, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [llama, gpt2, gemma3, whisper, with_a_prefix], ids=lambda make: make.__name__)
def test_a_model_with_a_cache_has_the_same_gradients(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make().double().train()
    again = copy.deepcopy(model)
    recompute(again)
    expected, found = gradients(model), gradients(again)
    assert any(bool(each.any()) for each in expected.values())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_text_in_two_pieces_reads_the_first_ones_cache() -> None:
    """The cache of a forward without gradients is read by one that is recomputed, and gets what comes to it."""
    ids = torch.arange(16).reshape(2, 8) % 20
    torch.manual_seed(0)
    model = llama().double().train()
    found = []
    for again in (False, True):
        net = copy.deepcopy(model)
        if again:
            recompute(net)
        with torch.no_grad():
            cache = net(input_ids=ids[:, :4], use_cache=True).past_key_values
        out = net(input_ids=ids[:, 4:], labels=ids[:, 4:], past_key_values=cache)
        assert out.past_key_values.get_seq_length() == 8
        out.loss.backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Padded(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = llama()

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        return self.model(input_ids=ids, attention_mask=mask, labels=ids).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(strategy: str, given: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after a fit on padded texts."""
    trainer = quiet(
        strategy=STRATEGIES[strategy](**given), devices=dist.get_world_size(), max_epochs=1, precision="64-true"
    )
    texts: Any = torch.arange(64).reshape(8, 8) % 20
    trainer.fit(Padded(), DataLoader(texts, 2))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_fit_on_padded_texts_has_the_same_bits(ranks: RankPool, strategy: str) -> None:
    pool = ranks(1 if strategy == "single" else 2)
    plain, again = (pool.run(fitted, strategy, given) for given in ({}, {"activation_checkpointing": True}))
    for weights, others in zip(plain, again, strict=True):
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
