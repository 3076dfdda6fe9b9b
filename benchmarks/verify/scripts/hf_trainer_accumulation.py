"""Hugging Face Trainer: gradient accumulation, warmup, cosine rates and clipping, texts of different lengths."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

tokens = tokenizer()
data = Dataset.from_dict({"text": sentences(256)})
data = data.map(lambda batch: tokens(batch["text"]), batched=True, remove_columns=["text"])
config = LlamaConfig(
    vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=20,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    bf16=True,
    logging_steps=1,
    report_to="none",
)
collator = DataCollatorForLanguageModeling(tokens, mlm=False)
Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data, data_collator=collator).train()
