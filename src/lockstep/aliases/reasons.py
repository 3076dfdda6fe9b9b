"""Why a name of Lightning's is not in lockstep, and what to do: the sentences that an ImportError ends with."""

from __future__ import annotations


class Refused(str):
    """A reason, in place of a home."""

    __slots__ = ()


FABRIC = Refused(
    "lockstep has no Fabric. For a hand-written loop take its engines: lockstep.DistributedDataParallel "
    "(from lockstep.parallel.ddp), lockstep.precision, lockstep.checkpoint; else give the loop to lockstep.Trainer."
)
TPU = Refused("lockstep runs on CPUs and CUDA GPUs, not on TPUs (XLA): use accelerator='auto'.")
MPS = Refused("lockstep runs on CPUs and CUDA GPUs, not on Apple's (MPS): use accelerator='cpu'.")
HPU = Refused("lockstep runs on CPUs and CUDA GPUs, not on Intel's Gaudi (HPU): use accelerator='auto'.")
ACCELERATOR = Refused(
    "lockstep names its accelerators in one table, lockstep.ground.device.ACCELERATORS: give "
    "Trainer(accelerator=...) a name, or an instance of a class derived from lockstep.accelerators.Accelerator."
)
DEVICES = Refused("give Trainer(devices=...) a number or a list; torch.cuda.device_count() says how many there are.")
DEVICE_STATS = Refused("ask torch: torch.cuda.memory_stats(device); or give the Trainer a DeviceStatsMonitor callback.")
DEEPSPEED = Refused("DeepSpeed is not built in lockstep: use strategy='ddp'.")
FSDP = Refused("FSDP is not built in lockstep: use strategy='ddp'.")
MODEL_PARALLEL = Refused("Tensor parallelism is not built in lockstep: use strategy='ddp'.")
STRATEGY_NAMES = Refused(
    "lockstep names its strategies in one table: give Trainer(strategy=...) a name or an instance."
)
PARALLEL_STRATEGY = Refused("lockstep has one base class of all strategies: lockstep.strategies.Strategy.")
PRECISION_NAMES = Refused(
    "lockstep chooses precision by name: Trainer(precision='32-true' | '64-true' | 'bf16-true' | '16-true' | "
    "'bf16-mixed' | '16-mixed'), without precision plugins."
)
QUANTIZED = Refused("lockstep has no 8-bit training: use precision='bf16-mixed' or 'bf16-true'.")
LOOPS = Refused(
    "Lightning's loops are inner parts; lockstep has its own, in lockstep.loop. Act on a run by hooks of the "
    "LightningModule and of callbacks."
)
INNER = Refused("an inner part of Lightning's Trainer that lockstep has no counterpart of; no user code needs it.")
LAUNCHERS = Refused("lockstep launches ranks by strategy='ddp' (scripts) or 'ddp_spawn'; there is no class to give.")
SERVE = Refused("lockstep trains models and does not serve them: export one by module.to_onnx(path).")
DEMO = Refused(
    "a model of Lightning's demonstrations, partly on data to download; lockstep's own are in the folder examples/: "
    "digits.py and language_model.py."
)
DOWNLOAD = Refused("lockstep downloads no data: bring your own data set, or see examples/language_model.py.")
LOGO = Refused("lockstep has no logo.")
MIGRATION = Refused(
    "lockstep reads checkpoints of Lightning 2.x as they are. Bring an older one up to date where Lightning is "
    "installed: python -m lightning.pytorch.utilities.upgrade_checkpoint FILE."
)
REGISTRY = Refused("lockstep downloads no models: give trainer.fit(..., ckpt_path=...) a path.")
SYNC_BATCHNORM = Refused("lockstep synchronizes BatchNorm over the ranks itself: use Trainer(sync_batchnorm=True).")
CHECKPOINT_IO = Refused(
    "lockstep has no base of wrappers: derive from lockstep.plugins.io.CheckpointIO, and keep the other one in it."
)
ENUM = Refused("write the word itself, 'norm' or 'value'.")
EPSILON = Refused("ask torch: torch.finfo(torch.float32).eps.")
OUT_OF_MEMORY = Refused("lockstep.utilities.memory.is_oom_error says whether an error is about used-up memory.")
PICKLE = Refused("try it: pickle.dumps(thing).")
HPARAMS = Refused("call self.save_hyperparameters() in __init__, and read self.hparams.")
HPARAMS_FILE = Refused(
    "use yaml: yaml.safe_load(file). CSVLogger and TensorBoardLogger write hparams.yaml, and "
    "load_from_checkpoint(hparams_file=...) reads it."
)
BATCH_SIZE = Refused("lockstep's loader knows how many samples it drew; self.log(..., batch_size=...) says otherwise.")
SIGTERM = Refused("lockstep raises no exception of its own where SIGTERM ends a run: look at trainer.received_sigterm.")
SAMPLER = Refused(
    "lockstep's own sampler counts every sample once: leave Trainer(use_distributed_sampler=True), and give the "
    "Trainer plain loaders."
)
