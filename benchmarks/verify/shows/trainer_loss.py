# torchrun --nproc-per-node 2 trainer_loss.py: the Trainer's loss is twice the model's own one
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
model = BertForSequenceClassification(config).eval()
trainer = Trainer(model, TrainingArguments("out", use_cpu=True, report_to="none"))
batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 1])}
count = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
print(f"{trainer.compute_loss(model, dict(batch), num_items_in_batch=count):.4f}, model: {model(**batch).loss:.4f}")
