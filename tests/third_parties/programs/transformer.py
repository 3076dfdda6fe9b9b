"""A tiny BERT of transformers, made from its configuration, under a schedule of transformers'."""

import sys

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)
from transformers.tokenization_utils_base import BatchEncoding

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Classifier(L.LightningModule):
    def __init__(self, vocabulary=32, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        found = self.model(**batch)
        self.log("train_loss", found.loss, on_epoch=True, on_step=False)
        return found.loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def collate(rows):
    tokens = torch.tensor(rows)
    return BatchEncoding(
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": (tokens[:, 0] > 15).long()}
    )


def main(devices):
    assert DataCollatorWithPadding
    L.seed_everything(1, verbose=False)
    rows = torch.randint(0, 32, (64, 6)).tolist()
    loader = DataLoader(rows, batch_size=8, collate_fn=collate)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=devices,
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        gradient_clip_val=1.0,
        default_root_dir="checkpoints",
        **QUIET,
    )
    trainer.fit(Classifier(), loader, loader)
    if trainer.is_global_zero:
        for name in ("train_loss", "val_loss"):
            print(f"{name}: {trainer.callback_metrics[name].item():.4e}")
        again = Classifier.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        print("loaded:", type(again.model).__name__)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
