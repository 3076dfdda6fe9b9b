"""Lightning's import paths: ``from lockstep.<path in Lightning> import <name>`` works, or says why not.

Most of these modules exist only as rows of the table ``MODULES``: where each public name of lightning.pytorch 2.6 is in
lockstep, one row a name, one entry a module. The key of an entry is the module's path below ``lightning.pytorch``, and
below ``lockstep``. A row is

- ``"file"`` or ``"file:name"``: the home, a file of lockstep (or a face, or a module of torch) that has the object,
  by the same or another name;
- a `Refused` reason.

A module that is all refused has the reason in place of its rows. Where a file of lockstep has the module's path,
the entry needs rows only for what the file has not; an entry without rows says that it is the same module.

``install`` puts one finder before Python's own. Asked for a module of the table it

- makes it, where no file has this name: an *alias module*, whose names are fetched when they are first used;
- or completes the file's module by the names that Lightning has there and lockstep elsewhere;
- or refuses it, by an ImportError that says why and what to do. A refused name is no attribute of its module
  (``hasattr`` is False), and the statement that imports it gets the ImportError.

``lockstep.pytorch.<path>`` is the same module as ``lockstep.<path>``, for ``lightning.pytorch.<path>``. The objects
are those of the files where they are written (their ``__module__`` says so), so pickles do not depend on the path.

Faces import their names when somebody asks for them, by `late`: a face costs what is used of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from lockstep.ground.annotations import evaluate
from lockstep.ground.installed import ALIASES

# -- reasons: the sentences that an ImportError ends with ------------------------------------------------------


class Refused(str):
    """A reason, in place of a home."""

    __slots__ = ()


FABRIC = Refused(
    "lockstep has no Fabric. For a hand-written loop take its engines: lockstep.DistributedDataParallel "
    "(from lockstep.parallel.ddp), lockstep.precision, lockstep.checkpoint; else give the loop to lockstep.Trainer."
)
TPU = Refused("it is made for torch_xla. lockstep takes TPUs as devices of torch's, by torch_tpu: accelerator='tpu'.")
HPU = Refused("lockstep takes any device of torch's by its name: import Intel's package, and use accelerator='hpu'.")
ACCELERATOR = Refused(
    "lockstep names its accelerators in one table, lockstep.ground.device.ACCELERATORS: give "
    "Trainer(accelerator=...) a name, or an instance of a class derived from lockstep.accelerators.Accelerator."
)
DEVICES = Refused("give Trainer(devices=...) a number or a list; torch.cuda.device_count() says how many there are.")
DEVICE_STATS = Refused("ask torch: torch.cuda.memory_stats(device); or give the Trainer a DeviceStatsMonitor callback.")
DEEPSPEED_PRECISION = Refused(
    "DeepSpeed needs no precision plugin in lockstep: Trainer(strategy='deepspeed', precision='bf16-mixed')."
)
DEEPSPEED_SUMMARY = Refused("ModelSummary counts parameters in partitions as whole ones.")
FSDP = Refused("FSDP needs no precision plugin in lockstep: Trainer(strategy='fsdp', precision='bf16-mixed').")
CONSOLIDATE = Refused("`lockstep checkpoint convert FOLDER FILE` makes one file of a checkpoint in parts.")
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

LOG_ELSEWHERE = (
    "Log to TensorBoardLogger, CSVLogger, WandbLogger or MLFlowLogger, or write one of your own: derive from "
    "lockstep.loggers.Logger and pass it as Trainer(logger=...)."
)
COMET = Refused(
    f"what it does can only be seen on Comet's servers, so that no test could hold it to its word. {LOG_ELSEWHERE}"
)
LIT_LOGGER = Refused(f"it is the client of one company's service, which takes an account there. {LOG_ELSEWHERE}")
NEPTUNE = Refused(f"Neptune has closed its service, and Lightning 2.6 refuses it as well. {LOG_ELSEWHERE}")


# -- the rows --------------------------------------------------------------------------------------------------


Row = str | Refused
Rows = dict[str, Row]


def _all(names: str, row: Row) -> Rows:
    """The same row for several names, given in one string."""
    return dict.fromkeys(names.split(), row)


FACE: dict[str, Rows | Refused] = {
    "": {"Fabric": FABRIC, **_all("LIGHTNING_LOGO cli_lightning_logo", LOGO)}
    | {"disable_possible_user_warnings": INNER},
    "fabric": FABRIC,
    "core": {"LightningDataModule": "datamodule", "LightningModule": "module"},
    "core.datamodule": {"LightningDataModule": "datamodule"},
    "core.hooks": {
        "CheckpointHooks": "hooks:ModuleHooks",
        "DataHooks": "hooks:ModuleHooks",
        "ModelHooks": "hooks:ModuleHooks",
    },
    "core.mixins": {"HyperparametersMixin": "ground.hyperparameters"},
    "core.mixins.hparams_mixin": {"HyperparametersMixin": "ground.hyperparameters"},
    "core.module": {"LightningModule": "module", "MODULE_OPTIMIZERS": INNER},
    "core.optimizer": {"LightningOptimizer": "loop.optimizers", "do_nothing_closure": INNER},
    "core.saving": HPARAMS_FILE,
    "trainer": {"seed_everything": "ground.seed"},
    "trainer.trainer": {"Trainer": "trainer"},
    "trainer.states": _all("RunningStage TrainerFn TrainerState TrainerStatus", "ground.types"),
    "trainer.call": INNER,
    "trainer.configuration_validator": INNER,
    "trainer.connectors": INNER,
    "trainer.setup": INNER,
    "tuner": {},
    "tuner.tuning": {"Tuner": "tuner"},
    "tuner.batch_size_scaling": INNER,
    "tuner.lr_finder": {},
    "cli": {
        **_all("LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion", "ground.types"),
        "ModuleType": Refused("a type variable of Lightning's own; write typing.TypeVar."),
        "ReduceLROnPlateau": "torch.optim.lr_scheduler",
    },
    "demos": {
        **_all("BoringDataModule BoringModel", "testing.models"),
        **_all("DemoModel LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer", DEMO),
        "WikiText2": DOWNLOAD,
    },
    "demos.boring_classes": {
        **_all("BoringDataModule BoringDataModuleNoLen BoringModel ManualOptimBoringModel", "testing.models"),
        **_all("RandomDataset RandomDictDataset", "testing.models"),
        **_all("RandomIterableDataset RandomIterableDatasetWithLen", "testing.models"),
        **_all("DemoModel IterableBoringDataModule Net", DEMO),
    },
    "demos.lstm": DEMO,
    "demos.mnist_datamodule": DOWNLOAD,
    "demos.transformer": DEMO,
    "serve": SERVE,
    "overrides": {},
    "overrides.distributed": {
        **_all("UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper", SAMPLER),
        "prepare_for_backward": INNER,
    },
    "loops": LOOPS,
}

CALLBACKS: dict[str, Rows | Refused] = {
    "callbacks": {},
    "callbacks.batch_size_finder": {"BatchSizeFinder": "callbacks"},
    "callbacks.callback": {"Callback": "callbacks.base"},
    "callbacks.checkpoint": {"Checkpoint": "callbacks.model_checkpoint"},
    "callbacks.device_stats_monitor": {"DeviceStatsMonitor": "callbacks"},
    "callbacks.early_stopping": {},
    "callbacks.finetuning": {},
    "callbacks.gradient_accumulation_scheduler": {"GradientAccumulationScheduler": "callbacks"},
    "callbacks.lambda_function": {},
    "callbacks.lr_finder": {"LearningRateFinder": "callbacks"},
    "callbacks.lr_monitor": {},
    "callbacks.model_checkpoint": {},
    "callbacks.model_summary": {},
    "callbacks.on_exception_checkpoint": {"OnExceptionCheckpoint": "callbacks"},
    "callbacks.prediction_writer": {},
    "callbacks.progress": _all("ProgressBar RichProgressBar TQDMProgressBar", "callbacks"),
    "callbacks.progress.progress_bar": _all("ProgressBar get_standard_metrics", "callbacks.progress.base"),
    "callbacks.progress.rich_progress": {
        "RichProgressBar": "callbacks.progress.rich",
        "RichProgressBarTheme": "callbacks.progress.rich",
        "BatchesProcessedColumn": "callbacks.progress.rich_columns:Batches",
        "CustomBarColumn": "rich.progress:BarColumn",
        "CustomTimeColumn": "callbacks.progress.rich_columns:Times",
        "ProcessingSpeedColumn": "callbacks.progress.rich_columns:Speed",
        **_all(
            "CustomInfiniteTask CustomProgress MetricsTextColumn",
            Refused("override RichProgressBar.configure_columns; lockstep's own columns are its inner matter."),
        ),
    },
    "callbacks.progress.tqdm_progress": _all("TQDMProgressBar Tqdm convert_inf", "callbacks.progress.tqdm"),
    "callbacks.pruning": {},
    "callbacks.rich_model_summary": {"RichModelSummary": "callbacks.model_summary"},
    "callbacks.spike": {"SpikeDetection": "callbacks"},
    "callbacks.stochastic_weight_avg": {"StochasticWeightAveraging": "callbacks"},
    "callbacks.throughput_monitor": {"ThroughputMonitor": "callbacks"},
    "callbacks.timer": {
        "Timer": "callbacks",
        "Interval": Refused("write the word itself: Timer(interval='step') or 'epoch'."),
    },
    "callbacks.weight_averaging": {},
}

LOGGERS: dict[str, Rows | Refused] = {
    "loggers": {"CometLogger": COMET, "LitLogger": LIT_LOGGER, "NeptuneLogger": NEPTUNE},
    "loggers.comet": {"CometLogger": COMET, **_all("FRAMEWORK_NAME comet_experiment", INNER)},
    "loggers.csv_logs": {"CSVLogger": "loggers.csv", "ExperimentWriter": "loggers.csv"},
    "loggers.litlogger": {"LitLogger": LIT_LOGGER},
    "loggers.logger": {**_all("DummyLogger Logger rank_zero_experiment", "loggers.base"), "merge_dicts": INNER},
    "loggers.mlflow": {"MLFlowLogger": "loggers", "LOCAL_FILE_URI_PREFIX": INNER},
    "loggers.neptune": {"NeptuneLogger": NEPTUNE},
    "loggers.tensorboard": {},
    "loggers.utilities": INNER,
    "loggers.wandb": {"WandbLogger": "loggers"},
}

ENGINES: dict[str, Rows | Refused] = {
    "accelerators": {
        **_all("Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator", "ground.device"),
        "AcceleratorRegistry": ACCELERATOR,
        "find_usable_cuda_devices": DEVICES,
        "HPUAccelerator": HPU,
        **_all("TPUAccelerator XLAAccelerator", TPU),
    },
    "accelerators.accelerator": {"Accelerator": "ground.device"},
    "accelerators.cpu": {"CPUAccelerator": "ground.device", "get_cpu_stats": DEVICE_STATS},
    "accelerators.cuda": {"CUDAAccelerator": "ground.device", "get_nvidia_gpu_stats": DEVICE_STATS},
    "accelerators.mps": {"MPSAccelerator": "ground.device", "get_device_stats": DEVICE_STATS},
    "accelerators.xla": TPU,
    "profilers": {"XLAProfiler": TPU},
    "profilers.advanced": {"AdvancedProfiler": "profilers.base"},
    "profilers.base": {},
    "profilers.profiler": {"Profiler": "profilers.base"},
    "profilers.pytorch": {"ScheduleWrapper": INNER},
    "profilers.simple": {"SimpleProfiler": "profilers.base"},
    "profilers.xla": {"XLAProfiler": TPU},
    "strategies": {
        "ParallelStrategy": PARALLEL_STRATEGY,
        "StrategyRegistry": STRATEGY_NAMES,
        **_all("HPUParallelStrategy SingleHPUStrategy", HPU),
        **_all("SingleDeviceXLAStrategy SingleTPUStrategy XLAStrategy", TPU),
    },
    "strategies.ddp": {},
    "strategies.deepspeed": {"remove_module_hooks": INNER},
    "strategies.fsdp": {},
    "strategies.launchers": LAUNCHERS,
    "strategies.model_parallel": {},
    "strategies.parallel": PARALLEL_STRATEGY,
    "strategies.single_device": {"SingleDeviceStrategy": "strategies.base"},
    "strategies.single_xla": TPU,
    "strategies.strategy": {"Strategy": "strategies.base", **_all("TBroadcast TReduce", INNER)},
    "strategies.xla": TPU,
}

PLUGIN_PRECISION: Rows = {
    **_all("Precision PrecisionPlugin", "precision.base:Precision"),
    **_all("MixedPrecision MixedPrecisionPlugin", PRECISION_NAMES),
    **_all("DoublePrecision DoublePrecisionPlugin HalfPrecision HalfPrecisionPlugin", PRECISION_NAMES),
    **_all("BitsandbytesPrecision BitsandbytesPrecisionPlugin", QUANTIZED),
    **_all("TransformerEnginePrecision TransformerEnginePrecisionPlugin", QUANTIZED),
    **_all("DeepSpeedPrecision DeepSpeedPrecisionPlugin", DEEPSPEED_PRECISION),
    **_all("FSDPPrecision FSDPPrecisionPlugin FSDPMixedPrecisionPlugin", FSDP),
    **_all("TPUBf16PrecisionPlugin TPUPrecisionPlugin XLABf16PrecisionPlugin", TPU),
    **_all("XLAPrecision XLAPrecisionPlugin", TPU),
    "HPUPrecisionPlugin": HPU,
}
PLUGIN_IO: Rows = {
    "AsyncCheckpointIO": "checkpoint.io",
    **_all("CheckpointIO TorchCheckpointIO", "checkpoint.io"),
    "HPUCheckpointIO": HPU,
    "XLACheckpointIO": TPU,
}
LAYER_SYNC: Rows = _all("LayerSync TorchSyncBatchNorm", SYNC_BATCHNORM)

PLUGINS: dict[str, Rows | Refused] = {
    "plugins": {**PLUGIN_PRECISION, **PLUGIN_IO, **LAYER_SYNC, "ClusterEnvironment": "cluster.environments"},
    "plugins.environments": {
        **_all("ClusterEnvironment LightningEnvironment TorchElasticEnvironment", "cluster.environments"),
        **_all("KubeflowEnvironment LSFEnvironment MPIEnvironment SLURMEnvironment", "cluster.environments"),
        "XLAEnvironment": TPU,
    },
    "plugins.io": PLUGIN_IO,
    "plugins.io.async_plugin": {"AsyncCheckpointIO": "checkpoint.io"},
    "plugins.io.checkpoint_plugin": {"CheckpointIO": "checkpoint.io"},
    "plugins.io.torch_plugin": {"TorchCheckpointIO": "checkpoint.io"},
    "plugins.io.wrapper": CHECKPOINT_IO,
    "plugins.io.xla_plugin": TPU,
    "plugins.layer_sync": LAYER_SYNC,
    "plugins.precision": PLUGIN_PRECISION,
    "plugins.precision.amp": PRECISION_NAMES,
    "plugins.precision.bitsandbytes": QUANTIZED,
    "plugins.precision.deepspeed": DEEPSPEED_PRECISION,
    "plugins.precision.double": PRECISION_NAMES,
    "plugins.precision.fsdp": FSDP,
    "plugins.precision.half": PRECISION_NAMES,
    "plugins.precision.precision": {"Precision": "precision.base"},
    "plugins.precision.transformer_engine": QUANTIZED,
    "plugins.precision.xla": TPU,
}

UTILITIES: dict[str, Rows | Refused] = {
    "utilities": {
        **_all("FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON", EPSILON),
        "GradClipAlgorithmType": ENUM,
        "LightningEnum": Refused("derive from Python's own: class Word(str, enum.Enum)."),
        **_all("disable_possible_user_warnings is_shared_filesystem", INNER),
        **_all("find_shared_parameters set_shared_parameters", "ground.parameters"),
        "is_picklable": PICKLE,
        "measure_flops": "ground.throughput",
        "suggested_max_num_workers": "data.workers",
    },
    "utilities.apply_func": {},
    "utilities.argparse": INNER,
    "utilities.combined_loader": {},
    "utilities.compile": _all("from_compiled to_uncompiled", "loop.compiled"),
    "utilities.consolidate_checkpoint": CONSOLIDATE,
    "utilities.data": _all("BType extract_batch_size has_len_all_ranks", BATCH_SIZE)
    | {"suggested_max_num_workers": "data.workers"},
    "utilities.deepspeed": {
        "convert_zero_checkpoint_to_fp32_state_dict": "checkpoint.sharded",
        **_all("CPU_DEVICE ds_checkpoint_dir", CONSOLIDATE),
    },
    "utilities.enums": {"GradClipAlgorithmType": ENUM},
    "utilities.exceptions": {"SIGTERMException": SIGTERM},
    "utilities.grads": {},
    "utilities.imports": INNER,
    "utilities.memory": _all("is_cuda_out_of_memory is_cudnn_snafu is_out_of_cpu_memory", OUT_OF_MEMORY),
    "utilities.migration": MIGRATION,
    "utilities.model_helpers": {
        "is_overridden": "loop.overridden",
        "get_torchvision_model": Refused("call torchvision.models.get_model(name, weights=...)."),
    },
    "utilities.model_registry": REGISTRY,
    "utilities.model_summary": {
        "get_formatted_model_size": "callbacks.layer_table:readable_size",
        "get_human_readable_count": "callbacks.layer_table:readable_count",
        "parse_batch_shape": "callbacks.layer_table",
        "DeepSpeedSummary": DEEPSPEED_SUMMARY,
    },
    "utilities.model_summary.model_summary": {
        **_all("LayerSummary ModelSummary parse_batch_shape summarize", "callbacks.layer_table"),
        "get_formatted_model_size": "callbacks.layer_table:readable_size",
        "get_human_readable_count": "callbacks.layer_table:readable_count",
        **_all("LEFTOVER_PARAMS_NAME NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE", INNER),
    },
    "utilities.model_summary.model_summary_deepspeed": DEEPSPEED_SUMMARY,
    "utilities.parameter_tying": _all("find_shared_parameters set_shared_parameters", "ground.parameters"),
    "utilities.parsing": {
        "is_picklable": PICKLE,
        **_all("clean_namespace collect_init_args get_init_args parse_class_init_keys", HPARAMS),
        **_all("lightning_getattr lightning_hasattr lightning_setattr save_hyperparameters", HPARAMS),
    },
    "utilities.rank_zero": {
        **_all("WarningCache rank_zero_module", INNER),
        "LightningDeprecationWarning": Refused("rank_zero_deprecation warns with Python's own DeprecationWarning."),
    },
    "utilities.seed": {},
    "utilities.signature_utils": {"is_param_in_hook_signature": "loop.overridden"},
    "utilities.testing": INNER,
    "utilities.throughput": _all("Throughput get_available_flops measure_flops", "ground.throughput"),
    "utilities.types": {"DistributedDataParallel": "torch.nn.parallel"},
    "utilities.upgrade_checkpoint": MIGRATION,
    "utilities.warnings": {"PossibleUserWarning": Refused("lockstep warns with Python's own UserWarning.")},
}

# Names and paths of 2019 to 2022, which Lightning 2.6 has no more: what has another home today, and what is gone.
DATA_LOADER = Refused("a loader method needs no decorator: define `def train_dataloader(self)` alone.")
AUTO_MOVE = Refused("trainer.predict() moves batches to the device; elsewhere call batch.to(self.device).")
STEP_RESULT = Refused("return the loss from the step, and log by self.log(name, value).")
TEST_TUBE = Refused("test_tube is not kept up any more: use TensorBoardLogger(save_dir), from lockstep.loggers.")
METRICS = Refused("metrics are a package of their own: import them from torchmetrics; self.log takes its objects.")
LITE = Refused(f"LightningLite became Fabric: {FABRIC}")
APP = Refused("lockstep trains models and has no apps.")
BY_STRATEGY = Refused("give Trainer(strategy=...) a name, such as 'ddp', or a DDPStrategy(...) of lockstep.strategies.")
WRAPPER = Refused(
    "the Trainer wraps the module in nothing; for a loop of your own there are lockstep.DataParallel and "
    "lockstep.DistributedDataParallel."
)

_RANK_ZERO = "rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn"
_STEP_RESULTS = _all("EvalResult TrainResult", STEP_RESULT)
_OLD_LOGGERS: Rows = {"LightningLoggerBase": "loggers.base:Logger", "TestTubeLogger": TEST_TUBE}
_OLD_PROGRESS: Rows = {"ProgressBarBase": "callbacks.progress.base:ProgressBar"}

OLD: dict[str, Rows | Refused] = {
    "": {"data_loader": DATA_LOADER, **_STEP_RESULTS},
    "app": APP,
    "callbacks": {"GPUStatsMonitor": DEVICE_STATS, "XLAStatsMonitor": TPU, **_OLD_PROGRESS},
    "callbacks.gpu_stats_monitor": DEVICE_STATS,
    "callbacks.progress.base": _OLD_PROGRESS,
    "callbacks.pt_callbacks": _all("Callback EarlyStopping GradientAccumulationScheduler ModelCheckpoint", "callbacks"),
    "core": {"auto_move_data": AUTO_MOVE, "data_loader": DATA_LOADER},
    "core.decorators": {"auto_move_data": AUTO_MOVE, "data_loader": DATA_LOADER},
    "core.lightning": {"LightningModule": "module"},
    "core.memory": {"ModelSummary": "callbacks.layer_table"},
    "core.step_result": {"Result": STEP_RESULT, **_STEP_RESULTS},
    "lite": LITE,
    "loggers": _OLD_LOGGERS,
    "loggers.base": {**_OLD_LOGGERS, **_all(_RANK_ZERO, "ground.rank")},
    "loggers.test_tube": TEST_TUBE,
    "logging": {
        **_OLD_LOGGERS,
        "CometLogger": COMET,
        **_all("MLFlowLogger TensorBoardLogger WandbLogger", "loggers"),
    },
    "metrics": METRICS,
    "models": {},
    "models.trainer": {"Trainer": "trainer"},
    "overrides.data_parallel": WRAPPER,
    "plugins": {
        **_all("DDP2Plugin DDPPlugin DDPSpawnPlugin DataParallelPlugin SingleDevicePlugin", BY_STRATEGY),
        **_all("ParallelPlugin TrainingTypePlugin", BY_STRATEGY),
        **_all("DDPFullyShardedPlugin DDPShardedPlugin DDPSpawnShardedPlugin", BY_STRATEGY),
        "DeepSpeedPlugin": BY_STRATEGY,
        **_all("ApexMixedPrecisionPlugin NativeMixedPrecisionPlugin", PRECISION_NAMES),
    },
    "plugins.training_type": BY_STRATEGY,
    "profiler": {
        **_all("AdvancedProfiler PassThroughProfiler Profiler SimpleProfiler", "profilers.base"),
        "BaseProfiler": "profilers.base:Profiler",
        "PyTorchProfiler": "profilers.pytorch",
    },
    "root_module": {},
    "root_module.decorators": {"data_loader": DATA_LOADER},
    "root_module.root_module": {"LightningModule": "module"},
    "strategies": {
        **_all("DataParallelStrategy DDP2Strategy DDPSpawnStrategy HorovodStrategy", BY_STRATEGY),
        **_all("DDPFullyShardedNativeStrategy DDPFullyShardedStrategy DDPShardedStrategy", FSDP),
        "DDPSpawnShardedStrategy": FSDP,
    },
    "trainer.supporters": {"CombinedLoader": "data.combined"},
    "utilities.cli": {
        **_all("LightningArgumentParser LightningCLI SaveConfigCallback instantiate_class", "cli"),
        **_all(
            "CALLBACK_REGISTRY DATAMODULE_REGISTRY LR_SCHEDULER_REGISTRY MODEL_REGISTRY OPTIMIZER_REGISTRY",
            Refused("LightningCLI finds classes by their import paths; nothing has to be registered."),
        ),
    },
    "utilities.distributed": _all(_RANK_ZERO, "ground.rank"),
    "utilities.model_utils": {"is_overridden": "loop.overridden"},
    "utilities.seed": {"seed_everything": "ground.seed"},
}


def _merged(*tables: Mapping[str, Rows | Refused]) -> dict[str, Rows | Refused]:
    """One table of several; where two have rows of a module, it has all."""
    found: dict[str, Rows | Refused] = {}
    for path, rows in (item for table in tables for item in table.items()):
        before = found.get(path, {})
        found[path] = {**before, **rows} if isinstance(before, dict) and isinstance(rows, dict) else rows
    return found


MODULES = _merged(FACE, CALLBACKS, LOGGERS, ENGINES, PLUGINS, UTILITIES, OLD)
"""Every entry, by module path."""


# -- the finder -----------------------------------------------------------------------------------------------


ROOT = "lockstep"


def install() -> None:
    """Answer imports from the table, from now on; called once, when ``lockstep`` is imported."""
    ALIASES.install(_put)
    for name, rows in MODULES.items():
        there = sys.modules.get(f"{ROOT}.{name}" if name else ROOT)
        if there is not None:
            complete(there, rows if isinstance(rows, dict) else {})


def _put() -> Callable[[], object]:
    finder = AliasFinder()
    sys.meta_path.insert(0, finder)
    return lambda: sys.meta_path.remove(finder)


class AliasFinder(MetaPathFinder):
    """Finds the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the table; None for any other, which Python's own finders look for.

        Raises:
            ModuleNotFoundError: the table refuses the module.
        """
        root, _, name = fullname.partition(".")
        if root != ROOT or not name:
            return None
        first, _, rest = name.partition(".")
        if first == "pytorch":
            return ModuleSpec(fullname, _SameModule(f"{ROOT}.{rest}".rstrip(".")))
        rows = MODULES.get(name)
        if rows is None:
            above, _, last = name.rpartition(".")
            reason = refusal(above, last)
            if reason is not None:
                raise ModuleNotFoundError(f"{fullname}: {reason}")
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:  # without origin: a folder that holds no __init__
            return _completing(spec, rows if isinstance(rows, dict) else {})
        if isinstance(rows, Refused):
            # without its name: `from lockstep import fabric` would drop an error that says which module is missing
            raise ModuleNotFoundError(f"{fullname}: {rows}")
        return ModuleSpec(fullname, _AliasLoader(rows), origin="lockstep.aliases", is_package=_has_children(name))


class _AliasLoader(Loader):
    """Makes a module of nothing but rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Names of Lightning's {module.__name__.removeprefix(ROOT)[1:]}, from where lockstep has them."
        vars(module)["__all__"] = sorted(name for name, row in self.rows.items() if not isinstance(row, Refused))
        complete(module, self.rows)


class _SameModule(Loader):
    """Gives a module that is there under a second name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just put the second name's there


def _completing(spec: ModuleSpec, rows: Rows) -> ModuleSpec:
    """``spec``, whose loader completes the module when the file has run."""
    run = spec.loader.exec_module  # type: ignore[union-attr]

    def exec_module(module: ModuleType) -> None:
        run(module)
        complete(module, rows)

    spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


def complete(module: ModuleType, rows: Rows) -> None:
    """Have ``module`` answer for the names of ``rows`` and for the modules below it, when they are asked for."""
    names: Any = vars(module)
    own: Callable[[str], Any] | None = names.get("__getattr__")
    listed: Callable[[], Sequence[str]] | None = names.get("__dir__")

    def __getattr__(name: str) -> Any:
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                return fetch(module, rows, name)
        return fetch(module, rows, name)

    def __dir__() -> list[str]:
        found = {name for name, row in rows.items() if not isinstance(row, Refused)}
        return sorted(found.union(listed() if listed is not None else names))

    names["__getattr__"], names["__dir__"] = __getattr__, __dir__
    refuses = any(isinstance(row, Refused) for row in rows.values())
    if "__path__" not in names and (refuses or _has_children(module.__name__.removeprefix(ROOT + "."))):
        names["__path__"] = []  # a file, and a package in Lightning: the finder is asked for what is below it


def fetch(module: ModuleType, rows: Rows, name: str) -> Any:
    """What ``module.name`` is: an object from its row, or a module below; kept in the module from then on.

    Raises:
        AttributeError: neither, or it is refused: the message says why.
    """
    full = f"{module.__name__}.{name}"
    row = rows.get(name)
    if isinstance(row, Refused):
        raise AttributeError(f"{full}: {row}")
    if row is not None:
        value = resolve(row, name)
        evaluate(value)
        setattr(module, name, value)
        return value
    if not name.startswith("_") and hasattr(module, "__path__"):
        try:
            found = find_spec(full)
        except ModuleNotFoundError as error:
            raise AttributeError(str(error)) from None
        if found is not None:
            return import_module(full)
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


def refusal(module: str, name: str) -> Refused | None:
    """Why the table refuses a name of a module, or all of the module; None where it does not.

    Args:
        module: its path below ``lockstep``.
        name: as it would be imported from there.
    """
    rows = MODULES.get(module)
    row = rows if isinstance(rows, Refused) or rows is None else rows.get(name)
    return row if isinstance(row, Refused) else None


def resolve(row: str, name: str) -> Any:
    """The object that a row stands for.

    Args:
        row: of the table, a home.
        name: as it is imported; a home without ``:name`` has it by this name.
    """
    home, _, attribute = row.partition(":")
    return getattr(import_module(home if home.startswith(("torch.", "rich.")) else f"{ROOT}.{home}"), attribute or name)


def _has_children(name: str) -> bool:
    return any(module.startswith(f"{name}.") for module in MODULES)


# -- the names of a face --------------------------------------------------------------------------------------


def late(face: str, files: Mapping[str, str], name: str) -> Any:
    """What a name of a face stands for, for the face's ``__getattr__``; the face keeps it.

    Args:
        face: the ``__name__`` of the face.
        files: by name the file where it is written, as seen from the face: ``"base"``, or ``".tuner.lr_finder"`` for
            one beside the face.
        name: that is asked for.

    Raises:
        AttributeError: it is no name of the face.
        ImportError: its file cannot be imported.
    """
    if name not in files:
        raise AttributeError(f"module {face!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f".{files[name]}", face), name)
    except AttributeError as error:  # from within the file: Python would say that the face has no such name
        raise ImportError(f"{face}.{name} cannot be imported: {type(error).__name__}: {error}") from error
    evaluate(value)
    setattr(sys.modules[face], name, value)
    return value
