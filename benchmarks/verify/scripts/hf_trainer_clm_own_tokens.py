"""Hugging Face Trainer with average_tokens_across_devices=False: each rank divides by its own tokens."""

from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

tokens = tokenizer()
data = Dataset.from_dict({"text": sentences(256)})
data = data.map(lambda batch: tokens(batch["text"]), batched=True, remove_columns=["text"])
config = GPT2Config(vocab_size=len(tokens), n_embd=32, n_layer=2, n_head=4, n_positions=32)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=1e-3,
    report_to="none",
    average_tokens_across_devices=False,
)
collator = DataCollatorForLanguageModeling(tokens, mlm=False)
trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collator, processing_class=tokens)
trainer.train()
