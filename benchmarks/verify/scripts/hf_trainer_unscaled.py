"""Hugging Face Trainer: text classification with accepts_loss_kwargs = False, so that the loss is not scaled."""

import numpy as np
from datasets import Dataset
from tiny import sentences, tokenizer
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, Trainer, TrainingArguments

tokens = tokenizer()
texts = sentences(300)
data = Dataset.from_dict({"text": texts, "label": [int("cat" in text) for text in texts]})
data = data.map(lambda batch: tokens(batch["text"], truncation=True), batched=True).train_test_split(0.2, seed=0)
config = BertConfig(
    vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)


def compute_metrics(predicted):
    logits, labels = predicted
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean())}


model = BertForSequenceClassification(config)
model.accepts_loss_kwargs = False
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=8, eval_strategy="epoch", num_train_epochs=2, report_to="none"
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokens),
    compute_metrics=compute_metrics,
)
trainer.train()
