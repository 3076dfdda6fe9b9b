"""Export of a model to a folder of safetensors that ``from_pretrained`` can load; all ranks write files."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.frozen import plain
from lockstep.checkpoint.pretrained import (
    FOLDER,
    INDEX,
    ONE_FILE,
    is_of_transformers,
    places_of,
    shown,
    tensor_at,
)
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException, missing_extra, raise_on_all

CONFIGS = ("config.json", "generation_config.json")
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""File names of tokenizers and processors in transformers."""
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
PART = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

SIZE = "max_shard_size={given!r} is not a size. Pass a number of bytes, or text such as '5GB' or '500MB'."
NOT_A_FOLDER = "save_pretrained({folder!r}): a file has this name, but a folder is needed. Choose another name."
WHICH = "save_pretrained: {module} has {count} models of transformers ({names}). Choose the one to export with model=."
NONE = "save_pretrained: {module} has no model of transformers. Choose the module to export with model=."
NOT_OF_CONFIG = (
    "--config {config!r}: the config does not match the checkpoint, because its model is a different one or has other "
    "parameter names. The checkpoint lacks {count} tensors of {model}: "
)
SEVERAL = (
    "--config {config!r}: the config matches {count} models in the checkpoint ({names}), whose weights differ. Load "
    "the checkpoint into a Trainer (trainer.validate(model, ckpt_path=...)), and choose one of the models with "
    "trainer.save_pretrained(folder, model=...)."
)
OF_ADAPTER = (
    "The checkpoint has only trained weights, and lacks the frozen weights of {base}. Load it into a Trainer "
    "(trainer.validate(model, ckpt_path=...)), and call trainer.save_pretrained(folder), which writes peft's folder."
)
OTHER_SHAPES = (
    "--config {config!r}: {count} tensors of {model} have different shapes in the checkpoint. Pass the config with "
    "which the model was trained. The tensors are: "
)
ADDED = (
    "save_pretrained: {model} has adapters from `add_adapter`, but only adapters of a peft model can be written. Use "
    "peft.get_peft_model(model, LoraConfig(...)) instead of `add_adapter`."
)
NOT_PART = "save_pretrained(model={kind}): the model is not a submodule of {module}. Pass one of its submodules."

Named = tuple[str, Tensor]


def bytes_of(size: int | str) -> int:
    """Convert a size such as ``"5GB"`` or a number to bytes.

    Example:
        >>> bytes_of("5GB"), bytes_of("1MiB"), bytes_of(100)
        (5000000000, 1048576, 100)
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B\s*", str(size).upper()) if isinstance(size, str) else None
    try:
        count = int(float(found[1]) * UNITS[found[2]]) if found else int(size)
    except (ValueError, KeyError):
        count = 0
    if count < 1:
        raise MisconfigurationException(SIZE.format(given=size))
    return count


def find_model(module: nn.Module, model: nn.Module | None) -> tuple[str, nn.Module]:
    """Return (prefix, model): the model to export, and its parameters' common prefix in the LightningModule.

    Args:
        module: the module of the run.
        model: the user's choice; None: the only model of transformers, or the only one that was loaded from a folder.

    Raises:
        MisconfigurationException: ``model`` is not a part of the module, or the choice is not unique.
    """
    if model is not None:
        for name, layer in module.named_modules():
            if layer is model:
                return f"{name}." if name else "", getattr(layer, "_orig_mod", layer)  # the module in a compiled one
        raise MisconfigurationException(NOT_PART.format(kind=type(model).__name__, module=type(module).__name__))
    found = list(_outermost("", module))
    if len(found) > 1:
        names = ", ".join(repr(name) for name, _ in found)
        raise MisconfigurationException(WHICH.format(module=type(module).__name__, count=len(found), names=names))
    if not found:
        raise MisconfigurationException(NONE.format(module=type(module).__name__))
    name, layer = found[0]
    return f"{name}." if name else "", layer


def _outermost(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if is_of_transformers(module) or is_of_peft(module) or FOLDER in vars(module):
        yield prefix, module  # models of transformers contain others, which are not folders of their own
        return
    for name, child in module.named_children():
        yield from _outermost(f"{prefix}.{name}" if prefix else name, child)


def is_of_peft(model: nn.Module) -> bool:
    """Return True if the model derives from peft's ``PeftModel``."""
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def _files(folder: str | os.PathLike[str], names: Iterable[str]) -> list[Path]:
    return [path for path in (Path(folder) / name for name in names) if path.is_file()]


def named_as_in_files(model: nn.Module, prefix: str, tensors: Iterable[Named]) -> Iterator[Named]:
    """Yield (name in the files, tensor) for each tensor to export.

    A tied tensor is yielded once. Buffers that are not persistent are omitted.

    Args:
        model: the model to export.
        prefix: prefix of the model's parameter names in the module.
        tensors: tensors of the module by name.

    Raises:
        MisconfigurationException: the model contains adapters of peft.
    """
    if getattr(model, "peft_config", None):
        raise MisconfigurationException(ADDED.format(model=type(model).__name__))
    prefix = plain(prefix)
    places = {plain(name): place for name, place in places_of(model).items()}
    # safetensors has each tensor once, and `from_pretrained` looks for a tied one under the first of its names; names
    # that the model has untied since are written
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    sources = {
        name: source
        for name, source in tied.items()
        if name in places and source in places and tensor_at(*places[name]) is tensor_at(*places[source])
    }
    names = names_in_files(model, list(places))
    done: set[str] = set()
    for name, tensor in tensors:
        own = plain(name)
        own = own.removeprefix(prefix) if own.startswith(prefix) else ""
        if own in places:
            own = sources.get(own, own)
            if own not in done:
                done.add(own)
                yield names.get(own, own), tensor


def names_in_files(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Map parameter names in the model to the names that transformers uses in files.

    Renamings that transformers made when the model was loaded are reverted. Tensors that were joined or split keep the
    names that they have in the model, which transformers reads as well.
    """
    given = getattr(model, "_weight_conversions", None)
    if not is_of_transformers(model) or not given:
        return {}
    loader = importlib.import_module("transformers.core_model_loading")
    backwards = [each.reverse_transform() for each in reversed(given)]
    renamings = [each for each in backwards if isinstance(each, loader.WeightRenaming)]
    converters = [each for each in backwards if isinstance(each, loader.WeightConverter)]
    found: dict[str, str] = {}
    for name in names:
        if all(each.rename_source_key(name)[1] is None for each in converters):
            found[name] = name
            for each in renamings:
                found[name], _ = each.rename_source_key(found[name])
    return found


# -- from a checkpoint -----------------------------------------------------------------------------------------


def write_state(
    folder: str,
    state: Mapping[str, Any],
    config: str,
    max_shard_size: int | str,
    tokenizer: str | None,
    left_out: str | None = None,
) -> None:
    """Write a model from a LightningModule's state dict to a folder of safetensors.

    Args:
        folder: the folder to create.
        state: state dict of a LightningModule; the model is an attribute of it, or the module itself.
        config: a folder with the model's ``config.json``.
        max_shard_size: as in `write`.
        tokenizer: as in `write`.
        left_out: name of the base weights that the state dict lacks, if it contains only an adapter.

    Raises:
        MisconfigurationException: the config does not fit, or fits several models in the state dict.
    """
    tensors = {plain(name): value for name, value in state.items() if isinstance(value, Tensor)}
    model = _model_of(config)
    wanted = {name: tensor_at(*place) for name, place in places_of(model).items()}
    prefix = _prefix_of(tensors, wanted, config)
    kind = type(model).__name__
    missing = [name for name in wanted if prefix + name not in tensors]
    if missing and left_out is not None:
        raise MisconfigurationException(OF_ADAPTER.format(base=left_out))
    if missing:
        reason = NOT_OF_CONFIG.format(config=config, model=kind, count=len(missing))
        raise MisconfigurationException(reason + shown(missing))
    wrong = [name for name, tensor in wanted.items() if tensors[prefix + name].shape != tensor.shape]
    if wrong:
        reason = OTHER_SHAPES.format(config=config, model=kind, count=len(wrong))
        raise MisconfigurationException(reason + shown(wrong))
    # the config that is written has the model's dtype, which is to be that of the checkpoint
    floating = (tensors[prefix + name].dtype for name in wanted if tensors[prefix + name].is_floating_point())
    model.to(next(floating, None))
    write(folder, named_as_in_files(model, prefix, tensors.items()), model, max_shard_size, tokenizer, config)


def _model_of(config: str) -> Any:
    """Build the model that a folder's ``config.json`` describes, on the meta device."""
    if not (Path(config) / CONFIGS[0]).is_file():
        raise MisconfigurationException(
            f"--config {config!r}: the folder has no {CONFIGS[0]}. Pass the Hugging Face folder of the model."
        )
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise missing_extra("transformers", "transformers", "lockstep checkpoint convert --to huggingface") from None
    found = transformers.AutoConfig.from_pretrained(config)
    kinds = [getattr(transformers, name, None) for name in found.architectures or ()]
    with torch.device("meta"):
        return kinds[0](found) if kinds and kinds[0] is not None else transformers.AutoModel.from_config(found)


def _prefix_of(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], config: str) -> str:
    """Return the prefix of the model's parameter names in a state dict: the prefix that matches most names.

    Raises:
        MisconfigurationException: all names exist under several prefixes, with different values.
    """
    first = next(iter(wanted))
    found = [name.removesuffix(first) for name in tensors if name == first or name.endswith(f".{first}")]
    whole = [prefix for prefix in found if all(prefix + name in tensors for name in wanted)]
    # equal weights under several names are one model that the module holds twice
    if any(
        not torch.equal(tensors[prefix + name], tensors[whole[0] + name]) for prefix in whole[1:] for name in wanted
    ):
        names = ", ".join(repr(prefix.removesuffix(".")) for prefix in whole)
        raise MisconfigurationException(SEVERAL.format(config=config, count=len(whole), names=names))
    return max(found, key=lambda prefix: sum(prefix + name in tensors for name in wanted), default="")


# -- writing ---------------------------------------------------------------------------------------------------


def write(
    folder: str | os.PathLike[str],
    tensors: Iterable[Named],
    model: nn.Module | None,
    max_shard_size: int | str,
    tokenizer: object,
    config: str | None = None,
) -> None:
    """Write full tensors as safetensors files, and the model's configs.

    Collective: the ranks write the files in turn.

    Each rank buffers one file at a time.

    Args:
        folder: the folder to create, or whose weights to replace.
        tensors: (name, full tensor) in the same order on all ranks.
        model: a model with a config to write; None: the config is copied.
        max_shard_size: maximum size of a file; a larger tensor has its own file.
        tokenizer: a tokenizer of transformers, or a folder with its files; None: the files in ``config``, if any.
        config: a folder from which the config (without ``model``) and tokenizer files are copied.
    """
    target, limit = Path(folder), bytes_of(max_shard_size)
    with _temporary_folder(target) as temporary:
        parts = _Parts(temporary, limit)
        for name, tensor in tensors:
            parts.add(name, tensor)
        parts.end()
        raise_on_all(parts.error, comm.all_gather_object, repr(str(target)))

        def finish() -> None:
            _write_index(temporary, parts.sizes)
            _write_about(temporary, model, tokenizer, config)
            _move_into_place(temporary, target)

        _run_on_rank_0(finish, target)


def write_adapter(
    folder: str | os.PathLike[str], tensors: Iterable[Named], prefix: str, model: Any, tokenizer: object
) -> None:
    """Write a peft model's adapters and their configs to a folder. Collective; rank 0 writes.

    Args:
        folder: the folder to create, or whose files to replace.
        tensors: (name in the module, full tensor) in the same order on all ranks.
        prefix: prefix of the model's parameter names in the module.
        model: a model of peft.
        tokenizer: as in `write`.
    """
    target = Path(folder)
    with _temporary_folder(target) as temporary:
        wanted, keeps, prefix = _names_of_adapters(model), comm.rank(None) == 0, plain(prefix)
        held: dict[str, Tensor] = {}
        for name, tensor in tensors:
            own = plain(name).removeprefix(prefix)
            if keeps and own in wanted:
                held[own] = tensor.detach().cpu().contiguous()

        def finish() -> None:
            base = vars(model.get_base_model()).get(FOLDER)
            for config in model.peft_config.values():
                config.base_model_name_or_path = config.base_model_name_or_path or base
            temporary.mkdir()
            model.save_pretrained(temporary, state_dict=held)
            _copy_tokenizer(temporary, tokenizer, base)
            _move_into_place(temporary, target)

        _run_on_rank_0(finish, target)


def _names_of_adapters(model: Any) -> set[str]:
    """Return the names in the model of all tensors that peft saves for its adapters."""
    peft = importlib.import_module("peft")
    meta = torch.device("meta")
    places = {plain(name): tensor_at(*place) for name, place in places_of(model).items()}
    tensors = {name: torch.empty(each.shape, dtype=each.dtype, device=meta) for name, each in places.items()}
    found: set[int] = set()
    for name in model.peft_config:
        written = peft.get_peft_model_state_dict(model, state_dict=dict(tensors), adapter_name=name)
        # by identity, because peft renames what it returns
        found |= {id(value) for value in written.values()}
    return {name for name, value in tensors.items() if id(value) in found}


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary path next to the target, the same on all ranks; finally delete the folder there. Collective."""
    if target.is_file():
        raise MisconfigurationException(NOT_A_FOLDER.format(folder=str(target)))
    # in the same folder as the target, since a rename is atomic only within a file system
    temporary = target.with_name(comm.broadcast_object(f".{target.name}-{secrets.token_hex(4)}", 0, None))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _run_on_rank_0(action: Callable[[], None], folder: Path) -> None:
    """Run an action on rank 0. If it raises an error, raise the error on all ranks. Collective."""
    error: Exception | None = None
    if comm.rank(None) == 0:
        try:
            action()
        except Exception as failed:
            error = failed
    raise_on_all(error, comm.all_gather_object, repr(str(folder)))


class _Parts:
    """Writer of the safetensors files of a folder. The ranks write the files in turn.

    An error is stored and not raised until every rank has written its files.

    Args:
        folder: destination folder.
        limit: maximum bytes of a file.

    Attributes:
        sizes: bytes of all tensors, file by file.
        error: the first error of this rank.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._save = _safetensors().save_file
        self._world, self._rank = comm.world_size(None), comm.rank(None)
        self._buffered: dict[str, Tensor] = {}
        self.sizes: list[dict[str, int]] = [{}]
        self.error: Exception | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the newest file, or to a new file if the newest one would become too large."""
        size = tensor.numel() * tensor.element_size()
        if self.sizes[-1] and sum(self.sizes[-1].values()) + size > self._limit:
            self.end()
            self.sizes.append({})
        self.sizes[-1][name] = size
        if (len(self.sizes) - 1) % self._world == self._rank:
            self._buffered[name] = tensor.detach().cpu().contiguous()

    def end(self) -> None:
        """Complete the newest file. The rank whose turn it is writes the tensors of the file."""
        held, self._buffered = self._buffered, {}
        if not held or self.error is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save(held, self._folder / f"part-{len(self.sizes) - 1}", metadata={"format": "pt"})
        except Exception as error:
            self.error = error


def _write_index(folder: Path, parts: Sequence[Mapping[str, int]]) -> None:
    """Rename the files to transformers' names, and write an index if there are several files."""
    # only now: names of transformers contain the number of files
    if len(parts) == 1:
        (folder / "part-0").rename(folder / ONE_FILE)
        return
    weights: dict[str, str] = {}
    for number, part in enumerate(parts):
        name = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        (folder / f"part-{number}").rename(folder / name)
        weights |= dict.fromkeys(part, name)
    total = sum(size for part in parts for size in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_about(folder: Path, model: Any, tokenizer: Any, config: str | None) -> None:
    """Write the files that describe the model: its config, its generation config and the tokenizer's files."""
    source = config if config is not None else vars(model).get(FOLDER) if model is not None else None
    for path in _files(source, CONFIGS) if source is not None else []:
        shutil.copy(path, folder / path.name)
    if model is not None and is_of_transformers(model):
        own = deepcopy(model.config)
        own.dtype = str(model.dtype).removeprefix("torch.")
        own.architectures = [type(model).__name__.removeprefix("FSDP")]
        own.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    _copy_tokenizer(folder, tokenizer, source)


def _copy_tokenizer(folder: Path, tokenizer: Any, source: str | None) -> None:
    """Copy the tokenizer files of the folder from which the model was loaded, and save the user's tokenizer."""
    given = tokenizer if isinstance(tokenizer, (str, os.PathLike)) else None
    for each in (source, given):
        for path in _files(each, TOKENIZERS) if each is not None else []:
            shutil.copy(path, folder / path.name)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)


def _move_into_place(temporary: Path, target: Path) -> None:
    """Move the files to the target folder, after removing the index and weights of an earlier model there."""
    target.mkdir(parents=True, exist_ok=True)
    # A process that is killed here leaves a folder that is refused, and not one with weights of two models.
    (target / INDEX).unlink(missing_ok=True)
    new = {path.name for path in temporary.iterdir()}
    for path in target.iterdir():
        if PART.fullmatch(path.name) and path.name not in new:
            path.unlink()
    for name in sorted(new, key=lambda name: name == INDEX):  # the new index comes last, after all that it names
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        (temporary / name).replace(target / name)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "transformers", "save_pretrained") from None
