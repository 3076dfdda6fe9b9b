"""TRL: SFTTrainer on plain texts."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

tokens = tokenizer()
config = LlamaConfig(
    vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(output_dir="out", per_device_train_batch_size=4, max_length=32, report_to="none"),
    train_dataset=Dataset.from_dict({"text": sentences(200)}),
    processing_class=tokens,
)
trainer.train()
