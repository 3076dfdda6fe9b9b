"""Sentence Transformers: negatives of all ranks, with gather_across_devices=True."""

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import StaticEmbedding
from tiny import sentences, tokenizer

model = SentenceTransformer(modules=[StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=32)], device="cpu")
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-2, report_to="none"
    ),
    train_dataset=Dataset.from_dict({"anchor": sentences(160, 0), "positive": sentences(160, 1)}),
    loss=losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
)
trainer.train()
