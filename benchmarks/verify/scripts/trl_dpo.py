"""TRL: DPOTrainer on pairs of answers."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

set_seed(0)  # the reference model has the same weights on all ranks
tokens = tokenizer()
config = LlamaConfig(
    vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
data = {"prompt": sentences(120, 0), "chosen": sentences(120, 1), "rejected": sentences(120, 2)}
trainer = DPOTrainer(
    model=LlamaForCausalLM(config),
    ref_model=LlamaForCausalLM(config),
    args=DPOConfig(output_dir="out", per_device_train_batch_size=4, max_length=48, report_to="none"),
    train_dataset=Dataset.from_dict(data),
    processing_class=tokens,
)
trainer.train()
