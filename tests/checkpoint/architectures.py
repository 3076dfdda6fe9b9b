"""Many architectures of transformers, each made small of a config, as modules that begin with a folder's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.checkpoint.tuned import WORDS, Tuned, class_of, write_model

WIDTH = 16
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes by the names that most decoders have."""
BERT = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
UP_AND_DOWN = {"mlp.gate_proj": "columns", "mlp.up_proj": "columns", "mlp.down_proj": "rows"}


def of_text(batch: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch}


def of_two_texts(batch: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch, "decoder_input_ids": batch.flip(1)}


def of_image(batch: Tensor) -> dict[str, Tensor]:
    """Made up of the numbers: 3 channels of 8 by 8."""
    points = torch.arange(3 * 8 * 8).reshape(3, 8, 8)
    return {"pixel_values": (batch.sum(1).reshape(-1, 1, 1, 1) * points % 17).to(torch.get_default_dtype()) / 17}


@dataclass(frozen=True)
class Architecture:
    """What a model is made of.

    Attributes:
        model: class of it.
        config: class of its config.
        sizes: of the config.
        inputs: of a batch of words.
        cut: by a layer's name in a block, how it is cut over ranks in two dimensions.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    inputs: Callable[[Tensor], dict[str, Tensor]] = of_text
    cut: dict[str, str] = field(default_factory=lambda: UP_AND_DOWN)

    def made(self) -> Any:
        """The model, with values if a device has memory."""
        config = class_of(self.config)(**self.sizes)
        config._experts_implementation = "eager"  # the other ones have no float64
        return class_of(self.model)(config)


ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        cut={},
    ),
    "bert": Architecture(
        "BertForMaskedLM", "BertConfig", BERT, cut={"intermediate.dense": "columns", "output.dense": "rows"}
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        of_two_texts,
        cut={},
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": 8, "patch_size": 4, "num_labels": WORDS},
        of_image,
        cut={},
    ),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4, "head_dim": 4}),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 4}),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 4}),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA, "head_dim": 4, "sliding_window": 4}),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {**LLAMA, "pad_token_id": 0}, cut={}),
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}, cut={}),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"shared_expert_intermediate_size": 8},
        cut={},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_shared_experts": 1}
        | {"num_key_value_heads": 4},
        cut={},
    ),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": WORDS, "dim": WIDTH, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
        | {"dropout": 0.0, "attention_dropout": 0.0},
        cut={},
    ),
    "roberta": Architecture("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 0}, cut={}),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": WORDS, "hidden_size": WIDTH, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"dropout": 0.0, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32},
        cut={},
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 4}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
        | {"max_source_positions": 3, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "decoder_start_token_id": 1},
        lambda batch: {
            "input_features": (batch.repeat(1, 4).reshape(-1, 4, 6) / WORDS).to(torch.get_default_dtype()),
            "decoder_input_ids": batch,
        },
        cut={},
    ),
}


def write_folder(folder: Path, kind: str) -> str:
    """A folder as `save_pretrained` writes it, in parts; no two values of it are alike."""
    torch.manual_seed(1)
    return str(write_model(ARCHITECTURES[kind].made(), folder))


class Begun(Tuned):
    """A model that begins with a folder's weights; under `ModelParallelStrategy` it cuts itself."""

    def __init__(self, folder: str, kind: str) -> None:
        super().__init__(folder, kind, ARCHITECTURES[kind].model)

    def built(self) -> Any:
        return ARCHITECTURES[self.kind].made()

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new and self.device_mesh is not None:
            self._cut()

    def _cut(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model: Any = self.model
        assert self.device_mesh is not None
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        plan = {name: styles[style]() for name, style in ARCHITECTURES[self.kind].cut.items()}
        lists = [layer for layer in model.modules() if isinstance(layer, nn.ModuleList)]
        blocks = [block for each in lists for block in each if len(list(block.children())) > 2]
        for block in blocks:
            if plan:
                parallelize_module(block, tensor, plan)
            fully_shard(block, mesh=data)
        fully_shard(self, mesh=data)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs = ARCHITECTURES[self.kind].inputs(batch)
        assert self.model is not None
        logits = self.model(**inputs).logits
        if logits.dim() == 2:  # one guess for each sample
            return nn.functional.cross_entropy(logits, batch[:, 0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)
