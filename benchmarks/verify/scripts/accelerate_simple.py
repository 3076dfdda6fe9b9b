"""Accelerate's nlp example: BERT, warmup schedule, gather_for_metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny import sentences, tokenizer
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

set_seed(42)
accelerator = Accelerator()
tokens = tokenizer()
texts = sentences(300)
samples = list(zip(texts, [int("cat" in text) for text in texts], strict=True))


def collate(batch):
    found = tokens([text for text, _ in batch], padding=True, return_tensors="pt")
    return {**found, "labels": torch.tensor([label for _, label in batch])}


train_loader = DataLoader(samples[:240], shuffle=True, collate_fn=collate, batch_size=8, drop_last=True)
eval_loader = DataLoader(samples[240:], collate_fn=collate, batch_size=16)
config = BertConfig(
    vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 10, len(train_loader) * 2)
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
for epoch in range(2):
    model.train()
    for batch in train_loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    correct, total = 0, 0
    for batch in eval_loader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        correct, total = correct + (predictions == references).sum().item(), total + len(references)
    accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f}")
