"""A small GPT, byte by byte, on the source code of Python's own standard library.

    python examples/language_model.py
    python examples/language_model.py --devices 2 --steps 150
    python examples/language_model.py --devices 2 --strategy fsdp:SHARD_GRAD_OP
    python examples/language_model.py --devices 2 --strategy deepspeed_stage_3_offload
    python examples/language_model.py --devices 4 --strategy model_parallel
    python examples/language_model.py --devices 2 --strategy balanced --slow-rank 1:3
    python examples/language_model.py --devices 2 --strategy balanced --split 1,3
    python examples/language_model.py --devices 2 --balance --slow-rank 1:3

The loss starts near ln 256 = 5.5 nats a byte and falls below 2.5 within a minute on one core.
"""

import argparse
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lockstep.callbacks import StageTimeline
from lockstep.strategies import BalancedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy


class ByteCorpus(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of ``block`` bytes; a sample is a piece and the same shifted by one, each int64 (block,)."""

    def __init__(self, text: bytes, block: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block = block

    @staticmethod
    def standard_library(megabytes: float = 2.0) -> bytes:
        """The start of the top-level modules, in order of name; the same for one version of Python."""
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        return text[: int(megabytes * 1e6)]

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        piece = self.bytes[start : start + self.block + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and with a residual; (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (batch, time) to the logits of the next byte (batch, time, 256)."""

    def __init__(self, layers: int, heads: int, width: int, block: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, bytes_in: Tensor) -> Tensor:
        x = self.tokens(bytes_in) + self.places.weight[: bytes_in.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_gpt(layers: int = 4, heads: int = 4, width: int = 128, block: int = 128) -> GPT:
    """A GPT, initialized as GPT-2: normal with 0.02, smaller where a layer adds to the residual stream."""
    gpt = GPT(layers, heads, width, block)
    for name, parameter in gpt.named_parameters():
        if parameter.dim() > 1:
            into_residual = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_residual else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return gpt


class LanguageModel(LightningModule):
    """Next-byte prediction; losses in nats a byte."""

    def __init__(self, lr: float = 1e-3, **sizes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = build_gpt(**sizes)

    def configure_model(self) -> None:
        """Split the blocks where the strategy has a mesh for it: each MLP over a row, and all that over the rows."""
        mesh = self.device_mesh
        if mesh is None:
            return
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return  # an earlier call of the Trainer has split them
        for block in self.gpt.blocks:
            parallelize_module(
                block.get_submodule("mlp"), mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(self.gpt, mesh=mesh["data_parallel"])

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        bytes_in, bytes_out = batch
        return cross_entropy(self.gpt(bytes_in).flatten(0, 1), bytes_out.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95))


class StandardLibrary(LightningDataModule):
    """The corpus, its last twentieth held out."""

    def __init__(self, block: int, batch_size: int, megabytes: float = 2.0) -> None:
        super().__init__()
        text = ByteCorpus.standard_library(megabytes)
        cut = len(text) * 19 // 20
        self.train, self.val = ByteCorpus(text[:cut], block), ByteCorpus(text[cut:], block)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=self.batch_size)


class PrintLoss(Callback):
    """One line after each validation."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        losses = ", ".join(f"{name} {value:.5f}" for name, value in sorted(trainer.callback_metrics.items()))
        trainer.print(f"step {trainer.global_step}: {losses}")


class SlowRank(Callback):
    """Makes one rank slower, as a throttled device is: it computes all again and again, on a model of its own.

    Args:
        rank: which.
        factor: how much slower; 3.0 computes all twice more.
        since: the step from which on it is slower.
        sizes: of the model.
    """

    def __init__(self, rank: int, factor: float, since: int, **sizes: int) -> None:
        self.rank, self.more, self.since = rank, factor - 1, since
        self.twin = build_gpt(**sizes)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """In a pipeline each block is slower by itself, on the rank that runs it."""
        if isinstance(trainer.strategy, BalancedStrategy) and trainer.global_rank == self.rank:
            for block in pl_module.gpt.blocks:
                block.register_forward_hook(partial(self._slow_down, trainer))

    def _slow_down(self, trainer: Any, block: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        (x,) = args
        if out.requires_grad and trainer.global_step >= self.since:
            self._again(self.twin.blocks[0].to(x.device), x.detach(), lambda out: out.sum())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Elsewhere each batch takes longer."""
        elsewhere = trainer.global_rank != self.rank or trainer.global_step < self.since
        if elsewhere or isinstance(trainer.strategy, BalancedStrategy):
            return
        bytes_in, bytes_out = batch
        twin = self.twin.to(bytes_in.device)
        self._again(twin, bytes_in, lambda out: cross_entropy(out.flatten(0, 1), bytes_out[: len(out)].flatten()))

    def _again(self, twin: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        """Forward and backward as often as the rank is slower; the last time of a part of the samples."""
        left = self.more
        while left > 0:
            part = x[: max(1, round(min(left, 1.0) * len(x)))]
            torch.autograd.grad(loss(twin(part)), [*twin.parameters()])
            left -= 1

    @staticmethod
    def parse(text: str) -> tuple[int, float, int]:
        """``"1:3"`` is rank 1, 3 times slower; ``"1:3@50"`` from step 50 on."""
        slower, _, since = text.partition("@")
        rank, _, factor = slower.partition(":")
        if not rank.isdigit() or not float(factor or 0) > 1 or not (since or "0").isdigit():
            raise argparse.ArgumentTypeError(f"{text!r}: give a rank and a factor above 1, 1:3 say, or 1:3@50")
        return int(rank), float(factor), int(since or 0)


class PrintSpeed(Callback):
    """At the end, how many pieces a second all ranks took in the median of the first and of the last ten steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.times = [time.perf_counter()]

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pieces = trainer.datamodule.batch_size * trainer.accumulate_grad_batches * trainer.strategy.replicas.count
        took = [end - begin for begin, end in pairwise(self.times[1:])]
        if len(took) >= 20:
            first, last = pieces / median(took[:10]), pieces / median(took[-10:])
            trainer.print(f"pieces a second: {first:.1f} at first, {last:.1f} at last")


def split_of(text: str) -> str | list[int]:
    """``"1,3"`` is one block on the first stage and three on the second."""
    return text if text in ("measured", "equal") else [int(blocks) for blocks in text.split(",")]


def strategy_named(name: str, devices: int, split: str | list[int]) -> str | Strategy:
    """A strategy by its name, behind a colon the mode of FSDP; "model_parallel" has rows of two."""
    kind, _, mode = name.partition(":")
    if kind == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=devices // 2, tensor_parallel_size=2)
    if kind == "balanced":
        return BalancedStrategy(split=split)
    return FSDPStrategy(sharding_strategy=mode) if mode else name


def main() -> None:
    """Train for a number of steps."""
    parser = argparse.ArgumentParser(description="Train a small GPT on the source of the standard library.")
    parser.add_argument("--devices", type=int, default=1, help="how many processes, or GPUs")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp, deepspeed_stage_2, balanced, ...")
    parser.add_argument("--precision", default="32-true", help="32-true, 64-true, bf16-mixed or 16-mixed")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces in a batch of one device")
    parser.add_argument("--accumulate", type=int, default=1, help="batches in one step of a device")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--block", type=int, default=128, help="bytes in a piece")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--split", type=split_of, default="measured", help="of --strategy balanced: measured, equal, or blocks by stage"
    )
    parser.add_argument("--balance", action="store_true", help="let shares of a batch follow the ranks' speed")
    parser.add_argument(
        "--slow-rank", type=SlowRank.parse, help="rank:factor@step makes a rank slower, 1:3 or 1:3@50 say"
    )
    parser.add_argument("--timeline", type=Path, help="of the stages of a pipeline, as CSV")
    parser.add_argument("--out", type=Path, help="folder for checkpoints; nothing is kept without")
    args = parser.parse_args()

    seed_everything(args.seed, workers=True)
    sizes = {"layers": args.layers, "heads": args.heads, "width": args.width, "block": args.block}
    model = LanguageModel(args.lr, **sizes)
    of_speed: list[Callback] = [PrintSpeed()] if args.balance or args.slow_rank or args.strategy == "balanced" else []
    if args.slow_rank is not None:
        of_speed.append(SlowRank(*args.slow_rank, **sizes))
    if args.timeline is not None:
        of_speed.append(StageTimeline(args.timeline))
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=strategy_named(args.strategy, args.devices, args.split),
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        max_steps=args.steps,
        max_epochs=-1,
        val_check_interval=max(1, args.steps * args.accumulate // 6),
        check_val_every_n_epoch=None,
        limit_val_batches=16,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        default_root_dir=args.out,
        logger=False,
        enable_checkpointing=args.out is not None,
        callbacks=[PrintLoss(), *of_speed],
        balance=args.balance,
    )
    trainer.fit(model, datamodule=StandardLibrary(args.block, args.batch_size))


if __name__ == "__main__":
    main()
