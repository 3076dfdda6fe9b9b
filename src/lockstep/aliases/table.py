"""Where each public name of lightning.pytorch 2.6 is in lockstep: one row a name, one entry a module.

The key of an entry is the module's path below ``lightning.pytorch``, and below ``lockstep``. A row is

- ``"file"`` or ``"file:name"``: the home, a file of lockstep (or a face, or a module of torch) that has the object,
  by the same or another name;
- a `Refused` reason.

A module that is all refused has the reason in place of its rows. Where a file of lockstep has the module's path,
the entry needs rows only for what the file has not; an entry without rows says that it is the same module.
"""

from __future__ import annotations

from lockstep.aliases import reasons
from lockstep.aliases.reasons import Refused

Row = str | Refused
Rows = dict[str, Row]


def _all(names: str, row: Row) -> Rows:
    """The same row for several names, given in one string."""
    return dict.fromkeys(names.split(), row)


FACE: dict[str, Rows | Refused] = {
    "": {"Fabric": reasons.FABRIC, **_all("LIGHTNING_LOGO cli_lightning_logo", reasons.LOGO)}
    | {"disable_possible_user_warnings": reasons.INNER},
    "fabric": reasons.FABRIC,
    "core": {"LightningDataModule": "datamodule", "LightningModule": "module"},
    "core.datamodule": {"LightningDataModule": "datamodule"},
    "core.hooks": {
        "CheckpointHooks": "hooks:ModuleHooks",
        "DataHooks": "hooks:ModuleHooks",
        "ModelHooks": "hooks:ModuleHooks",
    },
    "core.mixins": {"HyperparametersMixin": "ground.hyperparameters"},
    "core.mixins.hparams_mixin": {"HyperparametersMixin": "ground.hyperparameters"},
    "core.module": {"LightningModule": "module", "MODULE_OPTIMIZERS": reasons.INNER},
    "core.optimizer": {"LightningOptimizer": "loop.optimizers", "do_nothing_closure": reasons.INNER},
    "core.saving": reasons.HPARAMS_FILE,
    "trainer": {"seed_everything": "ground.seed"},
    "trainer.trainer": {"Trainer": "trainer"},
    "trainer.states": _all("RunningStage TrainerFn TrainerState TrainerStatus", "ground.states"),
    "trainer.call": reasons.INNER,
    "trainer.configuration_validator": reasons.INNER,
    "trainer.connectors": reasons.INNER,
    "trainer.setup": reasons.INNER,
    "tuner": {},
    "tuner.tuning": {"Tuner": "tuner"},
    "tuner.batch_size_scaling": reasons.INNER,
    "tuner.lr_finder": {},
    "cli": {
        **_all("LRSchedulerType LRSchedulerTypeTuple LRSchedulerTypeUnion", "ground.types"),
        "ModuleType": Refused("a type variable of Lightning's own; write typing.TypeVar."),
        "ReduceLROnPlateau": "torch.optim.lr_scheduler",
    },
    "demos": {
        **_all("BoringDataModule BoringModel", "testing.models"),
        **_all("DemoModel LightningLSTM LightningTransformer SequenceSampler SimpleLSTM Transformer", reasons.DEMO),
        "WikiText2": reasons.DOWNLOAD,
    },
    "demos.boring_classes": {
        **_all("BoringDataModule BoringDataModuleNoLen BoringModel ManualOptimBoringModel", "testing.models"),
        **_all("RandomDataset RandomDictDataset", "testing.models"),
        **_all("RandomIterableDataset RandomIterableDatasetWithLen", "testing.models"),
        **_all("DemoModel IterableBoringDataModule Net", reasons.DEMO),
    },
    "demos.lstm": reasons.DEMO,
    "demos.mnist_datamodule": reasons.DOWNLOAD,
    "demos.transformer": reasons.DEMO,
    "serve": reasons.SERVE,
    "overrides": {},
    "overrides.distributed": {
        **_all("UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper", reasons.SAMPLER),
        "prepare_for_backward": reasons.INNER,
    },
    "loops": reasons.LOOPS,
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
    "loggers": {},
    "loggers.comet": {"CometLogger": "loggers", **_all("FRAMEWORK_NAME comet_experiment", reasons.INNER)},
    "loggers.csv_logs": {"CSVLogger": "loggers.csv", "ExperimentWriter": "loggers.csv"},
    "loggers.litlogger": {"LitLogger": "loggers"},
    "loggers.logger": {**_all("DummyLogger Logger rank_zero_experiment", "loggers.base"), "merge_dicts": reasons.INNER},
    "loggers.mlflow": {"MLFlowLogger": "loggers", "LOCAL_FILE_URI_PREFIX": reasons.INNER},
    "loggers.neptune": {"NeptuneLogger": "loggers"},
    "loggers.tensorboard": {},
    "loggers.utilities": reasons.INNER,
    "loggers.wandb": {"WandbLogger": "loggers"},
}

ENGINES: dict[str, Rows | Refused] = {
    "accelerators": {
        **_all("Accelerator CPUAccelerator CUDAAccelerator", "ground.device"),
        "AcceleratorRegistry": reasons.ACCELERATOR,
        "find_usable_cuda_devices": reasons.DEVICES,
        "HPUAccelerator": reasons.HPU,
        "MPSAccelerator": reasons.MPS,
        **_all("TPUAccelerator XLAAccelerator", reasons.TPU),
    },
    "accelerators.accelerator": {"Accelerator": "ground.device"},
    "accelerators.cpu": {"CPUAccelerator": "ground.device", "get_cpu_stats": reasons.DEVICE_STATS},
    "accelerators.cuda": {"CUDAAccelerator": "ground.device", "get_nvidia_gpu_stats": reasons.DEVICE_STATS},
    "accelerators.mps": reasons.MPS,
    "accelerators.xla": reasons.TPU,
    "profilers": {"XLAProfiler": reasons.TPU},
    "profilers.advanced": {"AdvancedProfiler": "profilers.base"},
    "profilers.base": {},
    "profilers.profiler": {"Profiler": "profilers.base"},
    "profilers.pytorch": {"ScheduleWrapper": reasons.INNER},
    "profilers.simple": {"SimpleProfiler": "profilers.base"},
    "profilers.xla": {"XLAProfiler": reasons.TPU},
    "strategies": {
        "ParallelStrategy": reasons.PARALLEL_STRATEGY,
        "StrategyRegistry": reasons.STRATEGY_NAMES,
        "FSDPStrategy": reasons.FSDP,
        "DeepSpeedStrategy": reasons.DEEPSPEED,
        "ModelParallelStrategy": reasons.MODEL_PARALLEL,
        **_all("HPUParallelStrategy SingleHPUStrategy", reasons.HPU),
        **_all("SingleDeviceXLAStrategy SingleTPUStrategy XLAStrategy", reasons.TPU),
    },
    "strategies.ddp": {},
    "strategies.deepspeed": reasons.DEEPSPEED,
    "strategies.fsdp": reasons.FSDP,
    "strategies.launchers": reasons.LAUNCHERS,
    "strategies.model_parallel": reasons.MODEL_PARALLEL,
    "strategies.parallel": reasons.PARALLEL_STRATEGY,
    "strategies.single_device": {"SingleDeviceStrategy": "strategies.base"},
    "strategies.single_xla": reasons.TPU,
    "strategies.strategy": {"Strategy": "strategies.base", **_all("TBroadcast TReduce", reasons.INNER)},
    "strategies.xla": reasons.TPU,
}

PLUGIN_PRECISION: Rows = {
    **_all("Precision PrecisionPlugin", "precision.base:Precision"),
    **_all("MixedPrecision MixedPrecisionPlugin", reasons.PRECISION_NAMES),
    **_all("DoublePrecision DoublePrecisionPlugin HalfPrecision HalfPrecisionPlugin", reasons.PRECISION_NAMES),
    **_all("BitsandbytesPrecision BitsandbytesPrecisionPlugin", reasons.QUANTIZED),
    **_all("TransformerEnginePrecision TransformerEnginePrecisionPlugin", reasons.QUANTIZED),
    **_all("DeepSpeedPrecision DeepSpeedPrecisionPlugin", reasons.DEEPSPEED),
    **_all("FSDPPrecision FSDPPrecisionPlugin FSDPMixedPrecisionPlugin", reasons.FSDP),
    **_all("TPUBf16PrecisionPlugin TPUPrecisionPlugin XLABf16PrecisionPlugin", reasons.TPU),
    **_all("XLAPrecision XLAPrecisionPlugin", reasons.TPU),
    "HPUPrecisionPlugin": reasons.HPU,
}
PLUGIN_IO: Rows = {
    "AsyncCheckpointIO": "checkpoint.io",
    **_all("CheckpointIO TorchCheckpointIO", "checkpoint.io"),
    "HPUCheckpointIO": reasons.HPU,
    "XLACheckpointIO": reasons.TPU,
}
LAYER_SYNC: Rows = _all("LayerSync TorchSyncBatchNorm", reasons.SYNC_BATCHNORM)

PLUGINS: dict[str, Rows | Refused] = {
    "plugins": {**PLUGIN_PRECISION, **PLUGIN_IO, **LAYER_SYNC, "ClusterEnvironment": "cluster.environments"},
    "plugins.environments": {
        **_all("ClusterEnvironment LightningEnvironment TorchElasticEnvironment", "cluster.environments"),
        **_all("KubeflowEnvironment LSFEnvironment MPIEnvironment SLURMEnvironment", "cluster.environments"),
        "XLAEnvironment": reasons.TPU,
    },
    "plugins.io": PLUGIN_IO,
    "plugins.io.async_plugin": {"AsyncCheckpointIO": "checkpoint.io"},
    "plugins.io.checkpoint_plugin": {"CheckpointIO": "checkpoint.io"},
    "plugins.io.torch_plugin": {"TorchCheckpointIO": "checkpoint.io"},
    "plugins.io.wrapper": reasons.CHECKPOINT_IO,
    "plugins.io.xla_plugin": reasons.TPU,
    "plugins.layer_sync": LAYER_SYNC,
    "plugins.precision": PLUGIN_PRECISION,
    "plugins.precision.amp": reasons.PRECISION_NAMES,
    "plugins.precision.bitsandbytes": reasons.QUANTIZED,
    "plugins.precision.deepspeed": reasons.DEEPSPEED,
    "plugins.precision.double": reasons.PRECISION_NAMES,
    "plugins.precision.fsdp": reasons.FSDP,
    "plugins.precision.half": reasons.PRECISION_NAMES,
    "plugins.precision.precision": {"Precision": "precision.base"},
    "plugins.precision.transformer_engine": reasons.QUANTIZED,
    "plugins.precision.xla": reasons.TPU,
}

UTILITIES: dict[str, Rows | Refused] = {
    "utilities": {
        **_all("FLOAT16_EPSILON FLOAT32_EPSILON FLOAT64_EPSILON", reasons.EPSILON),
        "GradClipAlgorithmType": reasons.ENUM,
        "LightningEnum": Refused("derive from Python's own: class Word(str, enum.Enum)."),
        **_all("disable_possible_user_warnings is_shared_filesystem", reasons.INNER),
        **_all("find_shared_parameters set_shared_parameters", "ground.parameters"),
        "is_picklable": reasons.PICKLE,
        "measure_flops": "ground.throughput",
        "suggested_max_num_workers": "data.workers",
    },
    "utilities.apply_func": {},
    "utilities.argparse": reasons.INNER,
    "utilities.combined_loader": {},
    "utilities.compile": _all("from_compiled to_uncompiled", "loop.compiled"),
    "utilities.consolidate_checkpoint": reasons.FSDP,
    "utilities.data": _all("BType extract_batch_size has_len_all_ranks", reasons.BATCH_SIZE)
    | {"suggested_max_num_workers": "data.workers"},
    "utilities.deepspeed": reasons.DEEPSPEED,
    "utilities.enums": {"GradClipAlgorithmType": reasons.ENUM},
    "utilities.exceptions": {"SIGTERMException": reasons.SIGTERM},
    "utilities.grads": {},
    "utilities.imports": reasons.INNER,
    "utilities.memory": _all("is_cuda_out_of_memory is_cudnn_snafu is_out_of_cpu_memory", reasons.OUT_OF_MEMORY),
    "utilities.migration": reasons.MIGRATION,
    "utilities.model_helpers": {
        "is_overridden": "loop.overridden",
        "get_torchvision_model": Refused("call torchvision.models.get_model(name, weights=...)."),
    },
    "utilities.model_registry": reasons.REGISTRY,
    "utilities.model_summary": {
        "get_formatted_model_size": "callbacks.layer_table:readable_size",
        "get_human_readable_count": "callbacks.layer_table:readable_count",
        "parse_batch_shape": "callbacks.layer_table",
        "DeepSpeedSummary": reasons.DEEPSPEED,
    },
    "utilities.model_summary.model_summary": {
        **_all("LayerSummary ModelSummary parse_batch_shape summarize", "callbacks.layer_table"),
        "get_formatted_model_size": "callbacks.layer_table:readable_size",
        "get_human_readable_count": "callbacks.layer_table:readable_count",
        **_all("LEFTOVER_PARAMS_NAME NOT_APPLICABLE PARAMETER_NUM_UNITS UNKNOWN_SIZE", reasons.INNER),
    },
    "utilities.model_summary.model_summary_deepspeed": reasons.DEEPSPEED,
    "utilities.parameter_tying": _all("find_shared_parameters set_shared_parameters", "ground.parameters"),
    "utilities.parsing": {
        "is_picklable": reasons.PICKLE,
        **_all("clean_namespace collect_init_args get_init_args parse_class_init_keys", reasons.HPARAMS),
        **_all("lightning_getattr lightning_hasattr lightning_setattr save_hyperparameters", reasons.HPARAMS),
    },
    "utilities.rank_zero": {
        **_all("WarningCache rank_zero_module", reasons.INNER),
        "LightningDeprecationWarning": Refused("rank_zero_deprecation warns with Python's own DeprecationWarning."),
    },
    "utilities.seed": {},
    "utilities.signature_utils": {"is_param_in_hook_signature": "loop.overridden"},
    "utilities.testing": reasons.INNER,
    "utilities.types": {"DistributedDataParallel": "torch.nn.parallel"},
    "utilities.upgrade_checkpoint": reasons.MIGRATION,
    "utilities.warnings": {"PossibleUserWarning": Refused("lockstep warns with Python's own UserWarning.")},
}

MODULES: dict[str, Rows | Refused] = {**FACE, **CALLBACKS, **LOGGERS, **ENGINES, **PLUGINS, **UTILITIES}
"""Every entry, by module path."""
