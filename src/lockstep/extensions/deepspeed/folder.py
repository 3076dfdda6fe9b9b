"""Checkpoint folders of DeepSpeed's engine (ZeRO), read parameter by parameter for any number of ranks.

A folder contains

    ``latest``                                   name of the inner folder, ``checkpoint``
    ``*_model_states.pt``                        weights, shapes, buffers, and the rest of the run; one file, in stage 3
                                                 one per rank
    ``zero_pp_rank_R_mp_rank_00_optim_states.pt``  rank R's slice of the flattened float32 weights and optimizer states
    ``zero_to_fp32.py``                          DeepSpeed's script that converts the folder to a file of whole weights

The files are pickles of DeepSpeed's classes, which torch reads only with ``weights_only=False``.
"""

from __future__ import annotations

import importlib.metadata
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import damage, format, sharded, storage
from lockstep.checkpoint.io import TorchCheckpointIO
from lockstep.checkpoint.sharded import LATEST, Place
from lockstep.checkpoint.storage import PathLike
from lockstep.extensions.deepspeed import package
from lockstep.ground import comm
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, missing_extra

TAG = "checkpoint"
"""Name of the inner folder, as in Lightning."""
NAMES = "optimizer's parameters"
"""Key in the strategy's entry of a checkpoint: parameters' names by their numbers in the optimizer's state dict."""
PICKLED = (
    "{path!r} is in DeepSpeed's own format: its files are pickles, which can run code. If you trust its author, read "
    "it with weights_only=False (as in trainer.fit(ckpt_path=..., weights_only=False)), or convert it to a checkpoint "
    "without code: lockstep checkpoint convert --pickled {path} NEW"
)
FOREIGN = (
    "{path!r} was written for a model with tensor or pipeline parallelism. Only checkpoints of ZeRO without them can "
    "be read"
)
_ENGINES = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
        *("ds_version", "universal_checkpoint_info"),
    }
)
"""Entries that the engine adds to those of the run."""


def read(path: PathLike, place: Place | None, weights_only: bool | None) -> dict[str, Any]:
    """Read a DeepSpeed checkpoint folder, and return the dict that one process would have saved. Not a collective.

    Weights are whole and in float32. The optimizer's states are included if lockstep wrote the folder: Lightning does
    not record which state belongs to which parameter.

    Args:
        path: the folder.
        place: returns the target of a tensor. A target with ``start`` and ``to_local`` (a shard) receives its
            elements; otherwise the whole tensor is returned. None: whole tensors.
        weights_only: must be False.

    Raises:
        MisconfigurationException: ``weights_only`` is not False, or the model uses tensor or pipeline parallelism.
        ModuleNotFoundError: DeepSpeed, whose classes are in the files, is not installed.
        CorruptCheckpoint: a file is missing or damaged.
    """
    folder = storage.local(path)
    if weights_only is not False:
        raise MisconfigurationException(f"{PICKLED.format(path=str(folder))}.")
    if not package.is_installed():
        raise missing_extra("deepspeed", "deepspeed", f"reading {str(folder)!r}")
    package.import_quietly()
    files = folder / (folder / LATEST).read_text().strip()
    models = [_load(each) for each in _by_rank(files, "model")]
    states = [_load(each)["optimizer_state_dict"] for each in _by_rank(files, "optim")]
    checkpoint = {key: value for key, value in models[0].items() if key not in _ENGINES}
    try:
        groups = list(_groups(models[0], states))
        checkpoint["state_dict"] = _weights(models, groups, place)
        names = checkpoint.get(format.KEY, {}).get("strategy", {}).get(NAMES)
        optimizers = checkpoint.pop("optimizer_states", None)
        if names is not None and optimizers is not None:
            checkpoint["optimizer_states"] = [{**optimizers[0], "state": _optimizer(groups, names, place)}]
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpoint(
            f"The checkpoint {str(folder)!r} does not have the format of DeepSpeed's engine "
            f"({damage.first_line(error)}). Resume from another checkpoint."
        ) from error
    return checkpoint


def count_ranks(path: PathLike) -> int:
    """Return the number of ranks that wrote a checkpoint folder."""
    folder = storage.local(path)
    return len(_by_rank(folder / (folder / LATEST).read_text().strip(), "optim"))


def _by_rank(folder: Path, kind: str) -> list[Path]:
    """Return the "model" or "optim" files of a checkpoint folder, in the order of ranks."""
    found = {}
    for file in folder.glob(f"*_{kind}_states.pt"):
        parts = re.fullmatch(rf"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_{kind}_states\.pt", file.name)
        if parts is None or int(parts[2]):
            raise MisconfigurationException(f"{FOREIGN.format(path=str(folder.parent))}.")
        found[int(parts[1] or 0)] = file
    if not found or sorted(found) != list(range(len(found))):
        raise CorruptCheckpoint(
            f"The checkpoint {str(folder.parent)!r} lacks files {folder.name}/*_{kind}_states.pt: it has those of "
            f"ranks {sorted(found)}. Resume from an earlier checkpoint, or copy the folder again."
        )
    return [found[rank] for rank in sorted(found)]


def _load(file: Path) -> dict[str, Any]:
    """Load a file of a checkpoint folder. Tensors are memory-mapped and read on access."""
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CorruptCheckpoint(
            f"The file {str(file)!r} is damaged ({damage.first_line(error)}). Resume from an earlier checkpoint, or "
            "copy the folder again."
        ) from error
    return found


# -- from slices of flattened groups to parameters -----------------------------------------------------------


@dataclass
class _Group:
    """Parameters that the engine has flattened into one tensor, with the slices of all ranks.

    Attributes:
        shapes: shape by the parameter's name, in the group's order.
        starts: first index of each parameter in the flattened group; in stage 3 in each rank's slice.
        flat: slices of all ranks, by kind ("fp32", "exp_avg").
        plain: states that the optimizer has for the whole group.
        even: True if each rank has a share of each parameter (stage 3); False if it has a share of the group.
    """

    shapes: Mapping[str, torch.Size]
    starts: dict[str, int]
    flat: dict[str, list[Tensor]]
    plain: dict[str, Any]
    even: bool

    def whole(self, name: str, kind: str) -> Tensor:
        """Return the full tensor of a parameter (kind "fp32") or of one of its optimizer states."""
        shape, start, runs = torch.Size(self.shapes[name]), self.starts[name], self.flat[kind]
        numel = shape.numel()
        # the last rank's share is padded to the length of the others
        if self.even:
            share = -(-numel // len(runs))
            return torch.cat([run[start : start + share] for run in runs])[:numel].view(shape)
        found = []
        # a parameter may start in one rank's slice and end in a later one
        for run in runs:
            found.append(run[max(start, 0) : max(start + numel, 0)])
            start -= run.numel()
        return torch.cat(found).view(shape)


def _sizes(shapes: Mapping[str, Any], number: int, states: list[dict[str, Any]], even: bool) -> list[int]:
    """Return each parameter's length with padding: in the flattened group, or in a rank's slice if ``even``."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    if even:
        return [-(-size // len(states)) for size in sizes]
    # older versions did not align parameters
    paddings = states[0].get("param_alignment_paddings")
    if paddings is None:
        return sizes
    return [size + padding for size, padding in zip(sizes, paddings[number], strict=True)]


def _groups(model: Mapping[str, Any], states: list[dict[str, Any]]) -> Iterator[_Group]:
    even = "fp32_flat_groups" in states[0]
    inner = "optimizer_state_dict" if even else "base_optimizer_state"
    weights = "fp32_flat_groups" if even else "single_partition_of_fp32_groups"
    for number, shapes in enumerate(model["param_shapes"]):
        sizes = _sizes(shapes, number, states, even)
        starts = dict(zip(shapes, accumulate(sizes, initial=0), strict=False))
        runs = [state[weights][number] for state in states]
        found = [state[inner]["state"].get(number, {}) for state in states]
        flat = [key for key, value in found[0].items() if isinstance(value, Tensor) and value.dim() == 1]
        flats = {"fp32": runs, **{key: [each[key] for each in found] for key in flat}}
        plain = {key: value for key, value in found[0].items() if key not in flat}
        yield _Group(shapes, starts, flats, plain, even)


def _weights(models: list[dict[str, Any]], groups: list[_Group], place: Place | None) -> dict[str, Any]:
    """Return the module's state dict: full tensors, or shards that ``place`` creates, with their values."""
    first = models[0]
    trained = {name: group for group in groups for name in group.shapes}
    shared, frozen = first.get("shared_params") or {}, first.get("frozen_param_shapes") or {}
    in_shares = bool(groups) and groups[0].even
    made: dict[str, Any] = {}
    for name, value in first["module"].items():
        own = shared.get(name, name)
        plain = name.removeprefix("_forward_module.")  # written by earlier versions of Lightning
        if own != name and own in made:
            made[plain] = made[own]
        elif own in trained:
            made[plain] = _place(f"model.{plain}", trained[own].whole(own, "fp32"), place)
        elif own in frozen and in_shares:
            shape = torch.Size(frozen[own])
            parts = [model["frozen_param_fragments"][own] for model in models]
            made[plain] = _place(f"model.{plain}", torch.cat(parts)[: shape.numel()].view(shape), place)
        else:
            made[plain] = _place(f"model.{plain}", value, place) if isinstance(value, Tensor) else value
    return made


def _optimizer(groups: list[_Group], names: Mapping[int, str], place: Place | None) -> dict[int, dict[str, Any]]:
    """Return optimizer states by parameter index: full tensors, or shards that ``place`` creates, with their values."""
    of_name = {name: group for group in groups for name in group.shapes}
    made: dict[int, dict[str, Any]] = {}
    for number, name in names.items():
        group = of_name[name]
        state = {
            key: _place(f"optimizer_0.state.{number}.{key}", group.whole(name, key), place)
            for key in group.flat
            if key != "fp32"
        }
        if state or group.plain:
            # cloned for each parameter: optimizers increment `step` in place
            plain = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.plain.items()}
            made[number] = {**plain, **state}
    return made


def _place(name: str, whole: Tensor, place: Place | None) -> Tensor:
    target: Any = None if place is None else place(name, whole.shape, whole.dtype)
    # the files are mapped into memory: without a copy the values would be read later, when the folder may be gone
    if not hasattr(target, "start"):
        return whole.detach().clone()
    part = target.to_local()
    part.copy_(whole.detach().flatten()[target.start : target.start + part.numel()])
    stands_for: Tensor = target
    return stands_for


# -- writing -------------------------------------------------------------------------------------------------


class EngineCheckpointIO(TorchCheckpointIO):
    """Checkpoint writer for folders in DeepSpeed's own format.

    Attributes:
        save: function of the strategy that lets the engine write into a folder. Its second argument is the rest of
            the checkpoint: all entries but weights and optimizer states.
    """

    writes_shards = True
    writes_all_weights = True  # also the frozen ones
    save: Callable[[Path, dict[str, Any]], None]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a checkpoint folder. Collective.

        Raises the errors of `ShardedCheckpointIO`; a URL is refused.
        """
        self._check_options(storage_options)
        own = checkpoint.get(format.KEY, {})
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        written: dict[str, Any] = {}

        def put_together(parts: list[Any]) -> list[None]:
            ranks = {"ranks": parts} if "ranks" in own else {}
            written.update(format.with_version({**rest, format.KEY: {**own, **ranks}}))
            return [None] * len(parts)

        # rank 0's file has the entries of all ranks, so the others need nothing back
        sharded.together(lambda: own["ranks"][comm.rank()] if "ranks" in own else None, put_together)
        about = {**own.get("writer", {}), "epoch": rest.get("epoch"), "global_step": rest.get("global_step")}
        sharded.write_by(lambda folder: self.save(folder, written), about, path)


def write(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Write a full checkpoint into a folder in the engine's format, as a run on one rank with ZeRO stage 2 would.

    Args:
        checkpoint: a loaded checkpoint of a run under `DeepSpeedStrategy`, which saves the parameters' names.
        folder: an empty folder.

    Raises:
        MisconfigurationException: the checkpoint has no optimizer states, or not the names of their parameters.
        ModuleNotFoundError: DeepSpeed, whose classes are in the files, is not installed.
    """
    names = checkpoint.get(format.KEY, {}).get("strategy", {}).get(NAMES)
    if names is None or not checkpoint.get("optimizer_states"):
        raise MisconfigurationException(
            "The checkpoint cannot be converted to DeepSpeed's format: it lacks an optimizer's states or the names of "
            "its parameters, which only DeepSpeedStrategy saves. Resume from the checkpoint with "
            'strategy="deepspeed", and save a new one in that fit.'
        )
    if not package.is_installed():
        raise missing_extra("deepspeed", "deepspeed", "writing DeepSpeed's own files")
    package.import_quietly()
    groups: _Trained = []
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        trained = {number: names[number] for number in group["params"] if number in names}
        # the engine has no group for frozen parameters
        if trained:
            groups.append(({**group, "params": [len(groups)]}, trained))
    (folder / TAG).mkdir()
    torch.save(_model_file(checkpoint, groups), folder / TAG / "mp_rank_00_model_states.pt")
    torch.save(_optimizer_file(checkpoint, groups), folder / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / LATEST).write_text(TAG)


_Trained = list[tuple[dict[str, Any], dict[int, str]]]
"""Trained groups of the optimizer, each with the names of its parameters by number."""


def _untrained(weights: Mapping[str, Any], trained: Sequence[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (shared, untrained): other names of trained tensors, and the tensors that are not trained.

    Untrained tensors include buffers: a checkpoint does not mark them, and the engine looks up frozen parameters only.
    """
    known = {weights[name].data_ptr(): name for name in trained}
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    originals = {name: known.get(value.data_ptr(), name) for name, value in tensors.items()}
    shared = {name: original for name, original in originals.items() if original != name}
    others = {*shared, *trained}
    return shared, {name: value for name, value in tensors.items() if name not in others}


def _model_file(checkpoint: Mapping[str, Any], groups: _Trained) -> dict[str, Any]:
    weights = checkpoint["state_dict"]
    shapes = [{name: weights[name].shape for name in trained.values()} for _, trained in groups]
    shared, rest = _untrained(weights, [name for each in shapes for name in each])
    return {
        **{key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")},
        "optimizer_states": [{**checkpoint["optimizer_states"][0], "state": {}}],
        "module": weights,
        "buffer_names": [],
        **dict.fromkeys(("optimizer", "lr_scheduler", "data_sampler", "random_ltd")),
        "param_shapes": shapes,
        "frozen_param_shapes": {name: value.shape for name, value in rest.items()},
        "frozen_param_fragments": rest,
        "shared_params": shared,
        "skipped_steps": 0,
        "global_steps": checkpoint.get("global_step", 0),
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": importlib.metadata.version("deepspeed"),
    }


def _optimizer_file(checkpoint: Mapping[str, Any], groups: _Trained) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    version = importlib.metadata.version("deepspeed")
    weights, saved = checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]
    flats, states, paddings = [], {}, []
    for number, (_, trained) in enumerate(groups):
        flat = torch.cat([weights[name].detach().float().flatten() for name in trained.values()])
        padding = flat.numel() % 2  # the engine pads a group to an even length
        first = saved.get(next(iter(trained)), {})
        states[number] = {
            key: _flatten([saved[each][key] for each in trained], padding) if key != "step" else value
            for key, value in first.items()
        }
        flats.append(flat)
        paddings.append(padding)
    inner = {
        "loss_scaler": LossScaler(scale=1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": {"state": states, "param_groups": [group for group, _ in groups]},
        "single_partition_of_fp32_groups": flats,
        "zero_stage": 2,
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(trained) for _, trained in groups],
        "partition_count": [1] * len(groups),
        "ds_version": version,
        "param_slice_mappings": [_mapping(trained.values(), weights) for _, trained in groups],
    }
    return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": version}


def _flatten(values: list[Any], padding: int) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values[0]
    return torch.cat([*[value.flatten() for value in values], values[0].new_zeros(padding)])


def _mapping(names: Iterable[str], weights: Mapping[str, Tensor]) -> dict[str, Any]:
    from deepspeed.utils.tensor_fragment import fragment_address

    made, start = {}, 0
    for name in names:
        made[name] = fragment_address(numel=weights[name].numel(), start=start)
        start += weights[name].numel()
    return made
