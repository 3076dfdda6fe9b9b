"""Hugging Face Trainer: masked language model; the collator draws which tokens are masked."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

tokens = tokenizer()
data = Dataset.from_dict({"text": sentences(256)})
data = data.map(lambda batch: tokens(batch["text"]), batched=True, remove_columns=["text"])
config = BertConfig(
    vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, report_to="none")
collator = DataCollatorForLanguageModeling(tokens, mlm_probability=0.3)
Trainer(model=BertForMaskedLM(config), args=args, train_dataset=data, data_collator=collator).train()
