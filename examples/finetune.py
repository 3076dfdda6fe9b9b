"""Fine-tunes a model of Hugging Face's on the source code of Python's own standard library, whole or by LoRA.

    python examples/finetune.py
    python examples/finetune.py --devices 2 --strategy fsdp
    python examples/finetune.py --devices 2 --strategy deepspeed_stage_3 --model bert
    python examples/finetune.py --devices 2 --strategy balanced --lora
    python examples/finetune.py --devices 4 --strategy 2-d
    python examples/finetune.py --devices 2 --strategy ddp --padded --accumulate 2
    python examples/finetune.py --devices 2 --strategy ddp --lora --kill-at 12    # then again, on 4 devices say

Nothing is downloaded: the folder of the pretrained model is made here, from a config. Each rank reads its part of it, a
small model that knows nothing yet; steps have the same losses under every strategy. A run that was killed goes on from
its last checkpoint when it is started again with the same `--folder`. The model is then written as a folder, read by
`from_pretrained`, and asked to go on with a line of Python.
"""

import argparse
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import lockstep
from lockstep import Callback, LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import ModelParallelStrategy, Strategy

MASKED = 0.15
"""The part of a text that BERT has to guess."""
TARGETS = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
"""Layers that get an adapter."""
MODELS = {"llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}
LINE = "def __init__(self, "


# -- a folder as one of the Hub's ------------------------------------------------------------------------------


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and three more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "<mask>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>")


def write_base(folder: Path, kind: str, layers: int, width: int, block: int) -> None:
    """A model as it would come from the Hub: weights in parts, config and tokenizer."""
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": max(block, 64)}
    common = {**sizes, "vocab_size": len(tokenizer)}
    if kind == "llama":
        config: Any = LlamaConfig(**common, num_key_value_heads=2)
    else:  # without dropout, which each strategy would draw in its own way
        config = BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    MODELS[kind].from_config(config).save_pretrained(folder, max_shard_size="500KB")
    tokenizer.save_pretrained(folder)


# -- text ------------------------------------------------------------------------------------------------------


class Pieces(Dataset[dict[str, Tensor]]):
    """Pieces of text; what is to be said of each token is the next one (llama), or what was masked (bert).

    Args:
        tokens: of the text.
        block: tokens in a piece.
        mask: the token for what BERT guesses; None for llama.
        padding: the token that fills up pieces, which are shorter then, each by another length; None: none is.
    """

    def __init__(self, tokens: Tensor, block: int, mask: int | None, padding: int | None = None) -> None:
        self.tokens, self.block, self.mask, self.padding = tokens, block, mask, padding

    def __len__(self) -> int:
        return len(self.tokens) // self.block

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        size = self.block if self.padding is None else self.block - 7 * index % (self.block - 1)
        given = self.tokens[index * self.block : index * self.block + size]
        labels = given
        if self.mask is not None:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(index))
            chosen = order[: max(1, round(MASKED * size))]
            piece, given, labels = given, given.clone(), torch.full_like(given, -100)
            given[chosen], labels[chosen] = self.mask, piece[chosen]
        if self.padding is None:
            return {"input_ids": given, "labels": labels}
        rest = (0, self.block - size)
        mask = nn.functional.pad(torch.ones_like(given), rest)
        given, labels = nn.functional.pad(given, rest, value=self.padding), nn.functional.pad(labels, rest, value=-100)
        return {"input_ids": given, "attention_mask": mask, "labels": labels}


def standard_library(kilobytes: int) -> str:
    """The start of the top-level modules, in order of name; the same for one version of Python."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return text[: kilobytes * 1000].decode(errors="ignore")


# -- what is trained -------------------------------------------------------------------------------------------


class FineTune(LightningModule):
    """A model that begins with the weights of a folder."""

    def __init__(
        self, folder: str, kind: str, lora: bool, lr: float, batch_size: int, block: int, padded: bool = False
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: Any = None

    def configure_model(self) -> None:
        """Make it without memory; what this rank keeps is read when the strategy has said what that is."""
        if self.model is not None:
            return
        folder, kind = self.hparams["folder"], self.hparams["kind"]
        with torch.device("meta"):
            self.model = MODELS[kind].from_config(AutoConfig.from_pretrained(folder))
        lockstep.load_pretrained(self.model, folder)
        layers = self.model.model.layers if kind == "llama" else self.model.bert.encoder.layer
        if self.hparams["lora"]:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS[kind]))
        if self.device_mesh is not None:
            self._split(layers)

    def _split(self, layers: nn.ModuleList) -> None:
        """Each MLP over a row of the mesh, and all that over the rows."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        columns = ["mlp.gate_proj", "mlp.up_proj", "intermediate.dense"]
        plan = {**{name: ColwiseParallel() for name in columns}, "mlp.down_proj": RowwiseParallel()}
        if self.hparams["kind"] == "bert":
            plan["output.dense"] = RowwiseParallel()
        mesh: Any = self.device_mesh
        for layer in layers:
            there = {name for name, _ in layer.named_modules()}
            own = {name: style for name, style in plan.items() if name in there}
            parallelize_module(layer, mesh["tensor_parallel"], own)
            fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The mean over a batch's targets counts as much as there are of them, however texts are cut into batches."""
        return {"loss": self.model(**batch).loss, "weight": self._targets(batch)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=int(self._targets(batch)))

    def _targets(self, batch: dict[str, Tensor]) -> Tensor:
        """How many labels the loss is a mean over; a causal model predicts none of the first ones."""
        labels = batch["labels"][:, 1:] if self.hparams["kind"] == "llama" else batch["labels"]
        return (labels != -100).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, self.hparams["lr"], eps=1e-5)

    def _loader(self, first: int, count: int, shuffle: bool) -> DataLoader[Any]:
        tokenizer = AutoTokenizer.from_pretrained(self.hparams["folder"])
        block, batch_size = self.hparams["block"], self.hparams["batch_size"]
        start, end = first * block, (first + count) * block
        text = standard_library(400)[:end]  # each character is a token, or several
        tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])[start:end]
        mask = tokenizer.mask_token_id if self.hparams["kind"] == "bert" else None
        padding = tokenizer.pad_token_id if self.hparams["padded"] else None
        return DataLoader(Pieces(tokens, block, mask, padding), batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(64, 1600, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(0, 64, shuffle=False)


class PrintLoss(Callback):
    """One line a validation."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.print(f"step {trainer.global_step}: loss {trainer.callback_metrics['val_loss']:.6f}")


class Kill(Callback):
    """Ends the last rank after so many steps, as a machine that fails does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


# -- what became of it -----------------------------------------------------------------------------------------


def read_back(folder: Path, base: Path, kind: str, lora: bool) -> Any:
    """The tuned model, as anybody reads it who has the folder."""
    if not lora:
        return MODELS[kind].from_pretrained(folder)
    from peft import PeftModel

    return PeftModel.from_pretrained(MODELS[kind].from_pretrained(base), folder)


def sample(model: Any, folder: Path, kind: str) -> str:
    """A line of Python that the model has finished; BERT fills in what was left out of it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind == "llama":
        asked = tokenizer(LINE, return_tensors="pt")
        told = model.generate(**asked, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        return str(tokenizer.decode(told[0]))
    asked = tokenizer(LINE.replace("init", "<mask>" * 4), return_tensors="pt")
    with torch.no_grad():
        guessed = model(**asked).logits[..., 3:].argmax(-1) + 3
    ids = torch.where(asked["input_ids"] == tokenizer.mask_token_id, guessed, asked["input_ids"])
    return str(tokenizer.decode(ids[0]))


def strategy_named(name: str, devices: int) -> str | Strategy:
    """A strategy by its name; "2-d" has rows of two."""
    return ModelParallelStrategy(devices // 2, 2) if name == "2-d" else name


def replicas_of(name: str, devices: int) -> int:
    """Copies of the model, each of which takes its part of a batch."""
    return {"2-d": devices // 2, "balanced": 1}.get(name, devices)


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description="Fine-tune a model of transformers on the standard library's source.")
    parser.add_argument("--devices", type=int, default=1, help="how many processes, or GPUs")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp, deepspeed_stage_3, 2-d, balanced")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--padded", action="store_true", help="pieces of different lengths")
    parser.add_argument("--lora", action="store_true", help="train an adapter alone")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=20, help="steps from one validation, and checkpoint, to the next")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces in a step of all devices")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--block", type=int, default=64, help="tokens in a piece")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--kill-at", type=int, help="a rank is killed after so many steps; start it again to go on")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/finetune"), help="for all that is written")
    return parser.parse_args()


def main() -> None:
    """Make a pretrained model, tune it, write it, read it, and let it write."""
    args = parsed()
    seed_everything(0, workers=True)
    base, tuned = args.folder / f"{args.model}-base", args.folder / f"{args.model}-tuned"
    if not base.exists() and int(os.environ.get("LOCAL_RANK", 0)) == 0:  # before other ranks are started
        write_base(base, args.model, args.layers, args.width, args.block)
    keep = ModelCheckpoint(
        args.folder / "checkpoints",
        f"{args.model}{'-lora' * args.lora}",
        every_n_train_steps=args.every,
        enable_version_counter=False,
        save_trainable_only=args.lora,
    )
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=strategy_named(args.strategy, args.devices),
        max_steps=args.steps,
        max_epochs=-1,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=args.every * args.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        callbacks=[keep, PrintLoss(), *([] if args.kill_at is None else [Kill(args.kill_at)])],
    )
    batch_size = args.batch_size // replicas_of(args.strategy, args.devices) // args.accumulate
    module = FineTune(str(base), args.model, args.lora, args.lr, batch_size, args.block, args.padded)
    trainer.fit(module, ckpt_path="last")
    trainer.save_pretrained(tuned)
    if trainer.is_global_zero:
        trainer.print(f"{tuned}: {sample(read_back(tuned, base, args.model, args.lora), tuned, args.model)!r}")


if __name__ == "__main__":
    main()
