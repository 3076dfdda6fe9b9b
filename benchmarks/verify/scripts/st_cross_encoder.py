"""Sentence Transformers: CrossEncoderTrainer with BinaryCrossEntropyLoss."""

from pathlib import Path

from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
from tiny import sentences, tokenizer
from transformers import BertConfig, BertForSequenceClassification

tokens = tokenizer()
folder = Path("tiny-bert")
config = BertConfig(
    vocab_size=len(tokens),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=1,
)
BertForSequenceClassification(config).save_pretrained(folder)
tokens.save_pretrained(folder)
model = CrossEncoder(str(folder), num_labels=1, device="cpu")
data = {"query": sentences(160, 0), "answer": sentences(160, 1), "label": [float(i % 2) for i in range(160)]}
trainer = CrossEncoderTrainer(
    model=model,
    args=CrossEncoderTrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, report_to="none"
    ),
    train_dataset=Dataset.from_dict(data),
    loss=losses.BinaryCrossEntropyLoss(model),
)
trainer.train()
