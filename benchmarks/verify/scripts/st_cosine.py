"""Sentence Transformers: SentenceTransformerTrainer with pairs and CosineSimilarityLoss."""

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
number = 160
data = Dataset.from_dict(
    {"a": sentences(number, 0), "b": sentences(number, 1), "score": [i / number for i in range(number)]}
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, learning_rate=1e-2, report_to="none"
    ),
    train_dataset=data,
    loss=losses.CosineSimilarityLoss(model),
)
trainer.train()
