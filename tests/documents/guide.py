"""The code blocks of a guide to distributed training with Lightning, in its order, indented, without comments.

A block that holds several things at once is a list of them. `digest` of a block is that of the guide's own.
"""

from __future__ import annotations

import hashlib
import re

SINGLE_NODE = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy='ddp',
    )
"""
TWO_NODES = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        num_nodes=2,
        strategy='ddp',
    )
"""
FSDP = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy='fsdp',
    )
"""
FSDP_CONFIGURED = """
    from lightning.pytorch.strategies import FSDPStrategy
    strategy = FSDPStrategy(
        sharding_strategy="FULL_SHARD",
        cpu_offload=False,
        mixed_precision=torch.float16,
    )
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy=strategy,
    )
"""
FSDP_OPTIONS = """
    from lightning.pytorch.strategies import FSDPStrategy
    strategy = FSDPStrategy(
        sharding_strategy="FULL_SHARD",
        activation_checkpointing=True,
        cpu_offload=True,
        backward_prefetch="BACKWARD_PRE",
        forward_prefetch=True,
        limit_all_gathers=True,
    )
"""
DEEPSPEED = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy='deepspeed',
        precision='16-mixed',
    )
"""
DEEPSPEED_CONFIGURED = """
    from lightning.pytorch.strategies import DeepSpeedStrategy
    strategy = DeepSpeedStrategy(
        stage=2,
        offload_optimizer=True,
        offload_parameters=True,
    )
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy=strategy,
    )
"""
DEEPSPEED_BY_FILE = """
    strategy = DeepSpeedStrategy(config="deepspeed_config.json")
"""
DEEPSPEED_FILE = """
    {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": true
            },
            "allgather_bucket_size": 2e8,
            "reduce_bucket_size": 2e8
        },
        "activation_checkpointing": {
            "partition_activations": true,
            "cpu_checkpointing": true
        },
        "fp16": {
            "enabled": true
        },
        "gradient_clipping": 1.0
    }
"""
SPAWN = """
    trainer = Trainer(strategy='ddp_spawn')
"""
EIGHT_NODES_BY_HAND = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        num_nodes=8,
        strategy='ddp',
    )
"""
EIGHT_NODES_OF_SLURM = EIGHT_NODES_BY_HAND
BATCH_SCRIPT = """
    #!/bin/bash
    #SBATCH --nodes=8
    #SBATCH --gres=gpu:4
    #SBATCH --ntasks-per-node=4
    #SBATCH --job-name=lightning_training
    python train.py
"""
CLUSTER = """
    from lightning.pytorch.strategies import DDPStrategy
    strategy = DDPStrategy(
        cluster_environment='TorchElastic',
    )
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        num_nodes=8,
        strategy=strategy,
    )
"""
ACCUMULATION = """
    trainer = Trainer(
        accumulate_grad_batches=4,
    )
"""
ACCUMULATION_BY_EPOCH = """
    trainer = Trainer(
        accumulate_grad_batches={
            0: 8,
            5: 4,
        }
    )
"""
CHECKPOINTING = """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
        CheckpointImpl,
        apply_activation_checkpointing,
    )
    class MyModule(L.LightningModule):
        def configure_model(self):
            self.model = MyTransformer()
            apply_activation_checkpointing(
                self.model,
                checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, CheckpointImpl.NO_REENTRANT),
                check_fn=lambda m: isinstance(m, TransformerBlock),
            )
"""
SIXTEEN_BITS = """
    trainer = Trainer(precision='16-mixed')
"""
BFLOAT16 = """
    trainer = Trainer(precision='bf16-mixed')
"""
FSDP_OFFLOAD = """
    from lightning.pytorch.strategies import FSDPStrategy
    strategy = FSDPStrategy(
        cpu_offload=True,
    )
"""
DEEPSPEED_OFFLOAD = """
    from lightning.pytorch.strategies import DeepSpeedStrategy
    strategy = DeepSpeedStrategy(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
    )
"""
SYNC_BATCHNORM = """
    trainer = Trainer(
        accelerator='gpu',
        devices=4,
        strategy='ddp',
        sync_batchnorm=True,
    )
"""
TUNER = """
    from lightning.pytorch.tuner import Tuner
    trainer = Trainer()
    tuner = Tuner(trainer)
    tuner.scale_batch_size(model, mode="power")
"""
CLIPPING = """
    trainer = Trainer(
        gradient_clip_val=1.0,
        gradient_clip_algorithm='norm',
    )
"""
BENCHMARK = """
    trainer = Trainer(
        benchmark=True,
    )
"""
LOADER = """
    def train_dataloader(self):
        return DataLoader(
            self.train_dataset,
            batch_size=32,
            shuffle=True,
        )
"""
OWN_SAMPLER = """
    trainer = Trainer(
        use_distributed_sampler=False,
    )
    from torch.utils.data.distributed import DistributedSampler
    def train_dataloader(self):
        sampler = DistributedSampler(self.train_dataset)
        return DataLoader(
            self.train_dataset,
            batch_size=32,
            sampler=sampler,
        )
"""
WORKERS = """
    def train_dataloader(self):
        return DataLoader(
            self.train_dataset,
            batch_size=32,
            num_workers=4,
            pin_memory=True,
            persistent_workers=True,
        )
"""
LOGS = """
    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log('train_loss', loss, sync_dist=True)
        return loss
"""
RANKS = """
    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero:
            print("This only prints once across all processes")
        rank = self.trainer.global_rank
        world_size = self.trainer.world_size
        return loss
"""
BARRIER = """
    def on_train_epoch_end(self):
        self.trainer.strategy.barrier()
        if self.trainer.is_global_zero:
            self.save_artifacts()
"""
ONE_FIRST = """
    trainer = Trainer(accelerator='gpu', devices=1)
    trainer = Trainer(accelerator='gpu', devices=2, strategy='ddp')
    trainer = Trainer(
        accelerator='gpu',
        devices=2,
        strategy='ddp',
        fast_dev_run=10,
    )
"""

BLOCKS: list[list[str]] = [
    [SINGLE_NODE, TWO_NODES],
    [FSDP, FSDP_CONFIGURED],
    [FSDP_OPTIONS],
    [DEEPSPEED, DEEPSPEED_CONFIGURED],
    [DEEPSPEED_BY_FILE],
    [DEEPSPEED_FILE],
    [SPAWN],
    [EIGHT_NODES_BY_HAND],
    [EIGHT_NODES_OF_SLURM],
    [BATCH_SCRIPT],
    [CLUSTER],
    [ACCUMULATION, ACCUMULATION_BY_EPOCH],
    [CHECKPOINTING],
    [SIXTEEN_BITS, BFLOAT16],
    [FSDP_OFFLOAD, DEEPSPEED_OFFLOAD],
    [SYNC_BATCHNORM],
    [TUNER],
    [CLIPPING],
    [BENCHMARK],
    [LOADER],
    [OWN_SAMPLER],
    [WORKERS],
    [LOGS],
    [RANKS],
    [BARRIER],
    [ONE_FIRST],
]


def digest(text: str) -> str:
    """Of a block's code alone: comments of Python's (behind two spaces or a line of its own) and white space left out.

    Example:
        >>> digest("a = 1 # one") == digest("    a=1")
        True
    """
    without = re.sub(r"(^|\s)# .*", "", text, flags=re.MULTILINE)
    return hashlib.sha256("".join(without.split()).encode()).hexdigest()[:16]
