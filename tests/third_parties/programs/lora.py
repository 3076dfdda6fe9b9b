"""A causal language model of transformers with peft's LoRA, as a script for Lightning has it."""

import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, get_cosine_schedule_with_warmup

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def make_pretrained(folder):
    """In the place of a download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Texts(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(0, 64, (count, 1), generator=generator)
        self.tokens = (starts + torch.arange(12)) % 64

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class LoraFineTuner(L.LightningModule):
    def __init__(self, model_name, lr=5e-2, rank=8):
        super().__init__()
        self.save_hyperparameters()
        base = AutoModelForCausalLM.from_pretrained(model_name)
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
        )
        self.model = get_peft_model(base, config)

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(devices):
    L.seed_everything(42, verbose=False)
    make_pretrained("pretrained")
    checkpoint = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", save_top_k=1)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        gradient_clip_val=1.0,
        callbacks=[checkpoint],
        **QUIET,
    )
    module = LoraFineTuner("pretrained")
    train = DataLoader(Texts(64), batch_size=8 // devices, shuffle=True)
    trainer.fit(module, train, DataLoader(Texts(16), batch_size=8 // devices))
    if trainer.is_global_zero:
        module.model.save_pretrained("adapter")
        print(f"trainable: {sum(p.numel() for p in module.parameters() if p.requires_grad)}")
        print(f"val_loss: {trainer.callback_metrics['val_loss'].item():.3e}")
        best = LoraFineTuner.load_from_checkpoint(checkpoint.best_model_path, model_name="pretrained")
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("pretrained"), "adapter")
        sample = next(iter(DataLoader(Texts(4), batch_size=4)))
        with torch.no_grad():
            same = torch.equal(read(**sample).loss, module.eval().cpu()(**sample).loss)
            print(f"same: {same} {bool(best(**sample).loss < 4)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
