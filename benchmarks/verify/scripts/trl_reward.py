"""TRL: RewardTrainer on pairs of answers."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

tokens = tokenizer()
config = LlamaConfig(
    vocab_size=len(tokens),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_labels=1,
    pad_token_id=tokens.pad_token_id,
)
trainer = RewardTrainer(
    model=LlamaForSequenceClassification(config),
    args=RewardConfig(output_dir="out", per_device_train_batch_size=4, max_length=48, report_to="none"),
    train_dataset=Dataset.from_dict({"chosen": sentences(120, 1), "rejected": sentences(120, 2)}),
    processing_class=tokens,
)
trainer.train()
