"""DeepSpeed's config, merged from the strategy's arguments, the user's config and the Trainer's flags.

Each setting has one owner; a second place may repeat its value, but a different value is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.ground.errors import MisconfigurationException

ZERO = "zero_optimization"
BUCKETS = 200_000_000
"""Default number of elements in a bucket, as in Lightning."""

_BLOCKS = {
    ZERO: (
        *("stage", "sub_group_size", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
        *("allgather_bucket_size", "reduce_bucket_size"),
    ),
    "activation_checkpointing": (
        *("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
        "synchronize_checkpoint_boundary",
    ),
    "aio": ("block_size", "queue_depth", "single_submit", "overlap_events", "thread_count"),
    "fp16": ("initial_scale_power", "loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale"),
}
"""Arguments of the strategy that have the same name in a block of the config."""
PLACES: dict[str, tuple[str, ...]] = {
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer",),
    **{name: (block, name) for block, names in _BLOCKS.items() for name in names},
}
"""Arguments of the strategy and their places in the config."""

OFFLOAD_OPTIMIZER = {"nvme_path": "nvme_path", "optimizer_buffer_count": "buffer_count", "pin_memory": "pin_memory"}
OFFLOAD_PARAMETERS = {
    "nvme_path": "nvme_path",
    "params_buffer_count": "buffer_count",
    "params_buffer_size": "buffer_size",
    "max_in_cpu": "max_in_cpu",
    "pin_memory": "pin_memory",
}
WHOLE = ("bucket_size", "_threshold", "group_size", "buffer_size", "max_live_parameters", "max_reuse_distance")
"""Endings of keys whose values are counts. JSON files often have 2e8, but DeepSpeed needs an integer."""

LOOPS = {
    "scheduler": "`configure_optimizers` returns the scheduler, and the Trainer steps it",
    "data_efficiency": "lockstep draws the samples of each rank",
    "curriculum_learning": "lockstep draws the samples of each rank",
    "pipeline": "lockstep runs whole models",
    "tensor_parallel": "use ModelParallelStrategy",
    "autotuning": "run the Trainer with each setting instead",
    "hybrid_engine": "it is for inference between steps",
    "elasticity": "lockstep resumes on any number of ranks",
    "torch_autocast": "choose the precision by Trainer(precision=...)",
    "amp": "choose the precision by Trainer(precision=...)",
    "zenflow": "it updates weights outside the loop",
    "compile": "compile the module by torch.compile",
}
"""Blocks of DeepSpeed's config that are refused because the Trainer does the same, and the way to do it."""

KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
    *("fp16", "bf16", "bfloat16", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
    *("communication_data_type", "data_types", "sparse_gradients", "steps_per_print", "wall_clock_breakdown"),
    *("dump_state", "memory_breakdown", ZERO, "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("activation_checkpointing", "aio", "comms_logger", "flops_profiler", "checkpoint", "disable_allgather"),
    *("tensorboard", "wandb", "csv_monitor", "comet", "gradient_allreduce_op", "log_level", "timers"),
    *("disable_python_gc", "dataloader_drop_last", "use_node_local_storage", "seq_parallel_communication_data_type"),
)
"""Other keys at the top of DeepSpeed's config."""

CHECKPOINTING = (
    *("partition_activations", "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints"),
    *("synchronize_checkpoint_boundary", "profile"),
)
PRECISIONS = {"32-true": None, "bf16-mixed": None, "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
"""The Trainer's precisions and the config's block for each; None means parameters in float32."""

Config = dict[str, Any]


def refuse(setting: str, why: str) -> MisconfigurationException:
    """Return an error that names a setting of the user's config and the reason why it is refused."""
    return MisconfigurationException(f"DeepSpeedStrategy(config=...): {setting}: {why}.")


def format_setting(path: Iterable[str], value: object) -> str:
    """Format a setting as the user wrote it in the config.

    Example:
        >>> format_setting(("zero_optimization", "stage"), 2)
        '"zero_optimization": {"stage": 2}'
    """
    text = json.dumps(value, default=repr)[:100]
    *outer, last = path
    text = f'"{last}": {text}'
    for name in reversed(outer):
        text = f'"{name}": {{{text}}}'
    return text


# -- reading -------------------------------------------------------------------------------------------------


def read(given: str | os.PathLike[str] | Mapping[str, Any] | None) -> Config:
    """Return the user's config as a dict, with counts converted to integers.

    Args:
        given: a dict, the path of a JSON file, or None for an empty config.

    Raises:
        MisconfigurationException: the file cannot be read, is not JSON, or does not contain a dict.
    """
    if given is None:
        return {}
    source: object = given
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        try:
            source = json.loads(path.read_text())
        except OSError as error:
            raise MisconfigurationException(
                f"DeepSpeedStrategy(config={str(given)!r}): the file cannot be read ({error.strerror}). Pass the path "
                f"of a JSON file, relative to {os.getcwd()!r}, or a dict."
            ) from None
        except ValueError as error:
            raise MisconfigurationException(
                f"DeepSpeedStrategy(config={str(given)!r}): the file is not JSON ({error}). Correct it, or pass a dict."
            ) from None
    if not isinstance(source, Mapping):
        raise MisconfigurationException(
            f"DeepSpeedStrategy(config={given!r:.100}): pass a dict, or a JSON file that contains one."
        )
    return {key: _plain(value, (key,)) for key, value in source.items()}


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, float) and path[-1].endswith(WHOLE):
        if not value.is_integer():
            raise refuse(format_setting(path, value), "pass an integer")
        return int(value)
    return value


def check_keys(config: Mapping[str, Any], zero_keys: Iterable[str]) -> None:
    """Refuse keys that DeepSpeed would silently ignore.

    Args:
        config: the user's config.
        zero_keys: keys of "zero_optimization" in the installed version of DeepSpeed.

    Raises:
        MisconfigurationException: for an unknown key, with the nearest one, and for a block whose work the Trainer
            does.
    """
    for key, value in config.items():
        if key in LOOPS:
            raise refuse(format_setting((key,), value), f"{LOOPS[key]}; remove the block")
    _check_known(config, (*KEYS, *LOOPS), ())
    for block, known in ((ZERO, zero_keys), ("activation_checkpointing", CHECKPOINTING)):
        inner = config.get(block, {})
        if not isinstance(inner, Mapping):
            raise refuse(format_setting((block,), inner), "the value of this block must be a dict")
        _check_known(inner, tuple(known), (block,))


def _check_known(given: Mapping[str, Any], known: tuple[str, ...], path: tuple[str, ...]) -> None:
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            way = f'did you mean "{near[0]}"? Correct it' if near else "see DeepSpeed's documentation of its config"
            raise refuse(format_setting((*path, key), value), f"DeepSpeed has no such key: {way}")


# -- arguments -----------------------------------------------------------------------------------------------


def with_integers(arguments: Mapping[str, Any]) -> Config:
    """Return the strategy's arguments, with counts converted to integers (2e8 becomes 200000000)."""
    return {name: _plain(value, (name,)) for name, value in arguments.items()}


def merge(arguments: Mapping[str, Any], config: Mapping[str, Any]) -> Config:
    """Return the config with the strategy's arguments merged in.

    Args:
        arguments: the arguments that are not None, by name.
        config: the user's config; not changed.

    Raises:
        MisconfigurationException: an argument and the config have different values.
    """
    made = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    made.setdefault(ZERO, {})
    for name, value in arguments.items():
        if name in PLACES:
            _put(made, PLACES[name], value, f"{name}={value!r}")
    _offload(made, "optimizer", arguments, OFFLOAD_OPTIMIZER)
    _offload(made, "parameters", arguments, OFFLOAD_PARAMETERS)
    zero = made[ZERO]
    stage = zero.setdefault("stage", 2)
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise MisconfigurationException(
            f"DeepSpeedStrategy(stage={stage!r}): choose 1 (shards optimizer states over the ranks), 2 (gradients, "
            'too) or 3 (parameters, too). To shard nothing, use strategy="ddp".'
        )
    # the block is for stage 3: before it parameters are whole on each device
    if stage != 3:
        zero.pop("offload_param", None)
    return made


def _put(config: Config, path: tuple[str, ...], value: Any, argument: str) -> None:
    *outer, last = path
    inner = config
    for name in outer:
        inner = inner.setdefault(name, {})
    if last in inner and inner[last] != value:
        raise MisconfigurationException(
            f"DeepSpeedStrategy({argument}, config=...): the config has {format_setting(path, inner[last])}. Pass one "
            "of them, or the same value in both."
        )
    inner[last] = value


def _offload(config: Config, what: str, arguments: Mapping[str, Any], details: Mapping[str, str]) -> None:
    flag = f"offload_{what}"
    name = "offload_param" if what == "parameters" else flag
    where = "offload_params_device" if what == "parameters" else "offload_optimizer_device"
    device = arguments.get(where, "cpu")
    if device not in ("cpu", "nvme"):
        raise MisconfigurationException(f'DeepSpeedStrategy({where}={device!r}): choose "cpu" or "nvme".')
    there = config[ZERO].get(name) or {}
    on = arguments.get(flag)
    if on is False and there.get("device", "none") != "none":
        raise MisconfigurationException(
            f"DeepSpeedStrategy({flag}=False, config=...): the config has {format_setting((ZERO, name), there)}. Pass "
            "one of them, or the same value in both."
        )
    if on:
        block = config[ZERO][name] = dict(there)
        _put(block, ("device",), device, f"{flag}=True")
        for argument, key in details.items():
            if argument in arguments and (key != "nvme_path" or device == "nvme"):
                _put(block, (key,), arguments[argument], f"{argument}={arguments[argument]!r}")


def find_disk(config: Mapping[str, Any]) -> str | None:
    """Return the folder to which states or parameters are offloaded; None without offload to a disk.

    Raises:
        MisconfigurationException: the folder is not named, or does not exist.
    """
    for key in ("offload_optimizer", "offload_param"):
        block = config[ZERO].get(key) or {}
        if block.get("device") == "nvme":
            path = block.get("nvme_path")
            if path is None or not Path(path).is_dir():
                raise MisconfigurationException(
                    f"DeepSpeedStrategy: {format_setting((ZERO, key, 'device'), 'nvme')}, nvme_path={path!r}: this is "
                    "not a folder. Set nvme_path to an existing folder on a fast disk."
                )
            return str(path)
    return None


# -- the Trainer's flags -------------------------------------------------------------------------------------


def _enabled(config: Config, block: str) -> object:
    """Return the value of "enabled" in a precision's block, or None if the key is missing."""
    return (config.get(block) or {}).get("enabled")


def set_precision(config: Config, precision: str, device: str) -> None:
    """Write the Trainer's precision into the config.

    Args:
        config: changed in place.
        precision: the Trainer's, a key of `PRECISIONS`.
        device: the run's device type.

    Raises:
        MisconfigurationException: the config has a different precision, or asks for float16 on a CPU.
    """
    # DeepSpeed accepts both names; only "bf16" is documented
    if "bfloat16" in config:
        config["bf16"] = config.pop("bfloat16")
    if device == "cpu" and (_enabled(config, "fp16") is True or precision.startswith("16")):
        setting = f'Trainer(precision="{precision}", accelerator="cpu", strategy="deepspeed")'
        if not precision.startswith("16"):
            setting = f"DeepSpeedStrategy(config=...): {format_setting(('fp16', 'enabled'), True)}"
        raise MisconfigurationException(
            f'{setting}: DeepSpeed does not compute in float16 on a CPU. Use Trainer(precision="bf16-mixed"), or a GPU.'
        )
    wanted = PRECISIONS[precision]
    for block in ("fp16", "bf16"):
        enabled = _enabled(config, block)
        if enabled is not None and enabled != "auto" and bool(enabled) != (block == wanted):
            flag = {"fp16": "16-mixed", "bf16": "bf16-true"}[block]
            fits = f'Trainer(precision="{flag}")' if enabled else 'Trainer(precision="32-true")'
            raise refuse(
                format_setting((block, "enabled"), enabled),
                f'Trainer(precision="{precision}") differs. Use {fits}, or remove the block from the config',
            )
    for block in ("fp16", "bf16"):
        if block == wanted:
            config[block] = {**(config.get(block) or {}), "enabled": True}
        else:
            config.pop(block, None)


def set_accumulation(config: Config, flag: int | Mapping[int, int]) -> None:
    """Set the engine's gradient accumulation to one micro-batch, since the loop decides when a window ends.

    Raises:
        MisconfigurationException: the config has a different number than the Trainer.
    """
    steps = config.get("gradient_accumulation_steps", "auto")
    if steps not in ("auto", flag):
        raise refuse(
            format_setting(("gradient_accumulation_steps",), steps),
            f"Trainer(accumulate_grad_batches={flag!r}) differs. Set the number in the Trainer, and remove it from the "
            "config",
        )
    config["gradient_accumulation_steps"] = 1


def set_clipping(config: Config, value: float | None, algorithm: str | None) -> None:
    """Set the engine's clipping norm to the config's value, or to 0.0 if the Trainer clips gradients.

    With a value of the Trainer the engine starts at 0.0 (no clipping): the loop sets the limit before each step.

    Raises:
        MisconfigurationException: the norms of the config and the Trainer differ, or the Trainer clips by value.
    """
    norm = config.get("gradient_clipping", 0.0)
    if value is not None and norm not in ("auto", 0.0, 0, value):
        raise refuse(
            format_setting(("gradient_clipping",), norm),
            f"Trainer(gradient_clip_val={value!r}) differs. Pass one of them, or the same value in both",
        )
    if value is not None and algorithm == "value":
        raise MisconfigurationException(
            f'Trainer(gradient_clip_val={value!r}, gradient_clip_algorithm="value"): DeepSpeed clips only by the norm '
            'of the whole gradient. Use gradient_clip_algorithm="norm", or strategy="fsdp".'
        )
    config["gradient_clipping"] = 0.0 if norm == "auto" or value is not None else float(norm)


def take_batch_sizes(config: Config) -> dict[str, int]:
    """Remove the batch sizes from the config, and return the sizes for `check_batches`.

    The engine only uses them to count samples, so its batch size is 1.
    """
    sizes = {key: config.pop(key, "auto") for key in ("train_micro_batch_size_per_gpu", "train_batch_size")}
    config["train_micro_batch_size_per_gpu"] = 1
    return {key: size for key, size in sizes.items() if size != "auto"}


def check_batches(sizes: Mapping[str, int], batch_size: int, micro_batches: int, world: int) -> None:
    """Raise an error if the config's batch sizes differ from the training DataLoader's.

    Args:
        sizes: sizes in the config, as returned by `take_batch_sizes`.
        batch_size: batch size of the loader.
        micro_batches: number of micro-batches in an accumulation window.
        world: number of ranks.

    Raises:
        MisconfigurationException: they differ.
    """
    right = {
        "train_micro_batch_size_per_gpu": batch_size,
        "train_batch_size": batch_size * micro_batches * world,
    }
    for key, size in sizes.items():
        if size != right[key]:
            raise refuse(
                format_setting((key,), size),
                f"the training loader has batch_size={batch_size}, which makes {right[key]} here. Remove the key from "
                "the config, or change the loader's batch_size",
            )


def check_optimizer(config: Config, optimizer: object) -> None:
    """Raise an error if the config's optimizer differs from the optimizer of `configure_optimizers`.

    Raises:
        MisconfigurationException: the config names another optimizer or other settings.
    """
    block = config.pop("optimizer", None)
    if block is None:
        return
    name = type(optimizer).__name__
    kind, settings = str(block.get("type", name)), dict(block.get("params", {}))
    # these select an implementation and do not change the update
    for key in ("torch_adam", "adam_w_mode", "fused"):
        settings.pop(key, None)
    if kind.lower() not in (name.lower(), name.lower().removeprefix("deepspeedcpu")):
        raise refuse(
            format_setting(("optimizer", "type"), kind),
            f"`configure_optimizers` returns {name}. Return {kind} there, and remove the block from the config",
        )
    own = getattr(optimizer, "defaults", {})
    for key, value in settings.items():
        if value != "auto" and key in own and _as_list(value) != _as_list(own[key]):
            raise refuse(
                format_setting(("optimizer", "params", key), value),
                f"`configure_optimizers` returns {name}({key}={own[key]!r}). Pass the same value in both, or remove "
                "the setting from the config",
            )


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def set_defaults(config: Config, device: str, numel: int) -> None:
    """Set defaults for the engine's required settings, in place.

    Args:
        config: the merged config.
        device: the run's device type.
        numel: number of elements in the module's parameters; no bucket is larger.
    """
    zero = config[ZERO]
    # even, as the engine flattens a group to an even number of elements
    largest = min(BUCKETS, numel + numel % 2)
    zero.setdefault("allgather_bucket_size", largest)
    zero.setdefault("reduce_bucket_size", largest)
    # it overlaps by CUDA streams
    zero.setdefault("overlap_comm", device == "cuda")
    # one sub group: each is a step of the optimizer of its own
    if zero.get("stage") == 3:
        zero.setdefault("sub_group_size", 1_000_000_000_000)
    config.setdefault("zero_allow_untested_optimizer", True)
    # otherwise offload accepts only DeepSpeedCPUAdam, which needs a compiler; torch's optimizers step on the CPU, too
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    # never: the Trainer prints
    config.setdefault("steps_per_print", 2**31)
