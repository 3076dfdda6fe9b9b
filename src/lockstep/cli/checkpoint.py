"""``lockstep checkpoint``: what is in a checkpoint, the same in another format, and what differs between two."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import export, format, frozen, sharded, storage
from lockstep.engines.deepspeed import folder as deepspeed_folder
from lockstep.ground.comm import as_bytes
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, missing_extra

ABOUT = """\
Show what a checkpoint holds, write it in another format, or compare two. A checkpoint is a file, a folder of parts, or
weights in safetensors.
"""
WEIGHTS = ".safetensors"
KINDS = ("file", "parts", "deepspeed", "huggingface")
PICKLED = "read files that may run code (weights_only=False), as DeepSpeed's own: of an author whom you trust"
ALIKE = (
    "epoch",
    "global_step",
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "hyper_parameters",
    "MixedPrecision",
)
"""What `diff` compares by default: what does not depend on where and on how many ranks a run was made."""
SHOWN = 40


def checkpoint(words: Sequence[str]) -> int:
    """The command; gives its exit code.

    Args:
        words: behind ``lockstep checkpoint``.

    Raises:
        MisconfigurationException: for what cannot be done, with the way out.
    """
    parser = argparse.ArgumentParser("lockstep checkpoint", description=ABOUT)
    actions = parser.add_subparsers(dest="action", metavar="show|convert|diff")
    show = actions.add_parser("show", help="epoch, step, parameters, optimizers, callbacks, who wrote it, its hashes")
    show.add_argument("paths", nargs="+", metavar="PATH")
    show.add_argument("--all", action="store_true", help=f"all parameters, not the first {SHOWN}")
    convert = actions.add_parser(
        "convert",
        help="a folder of parts to a file, a file or a folder of DeepSpeed's to a folder of parts; *.safetensors: the "
        "weights alone",
    )
    convert.add_argument(
        "--to",
        choices=KINDS,
        help="what to make; deepspeed: a folder of its engine's, of one rank; huggingface: one for from_pretrained",
    )
    convert.add_argument("--config", metavar="FOLDER", help="huggingface: of the model's config.json")
    convert.add_argument("--tokenizer", metavar="FOLDER", help="huggingface: of a tokenizer; default: that of --config")
    convert.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="huggingface: of a part (5GB)")
    convert.add_argument("source", metavar="PATH")
    convert.add_argument("target", metavar="NEW")
    diff = actions.add_parser("diff", help="what differs between two; exits with 0 where nothing does, else with 1")
    diff.add_argument("paths", nargs=2, metavar="PATH")
    diff.add_argument("--all", action="store_true", help="random states, callbacks, and who wrote it, too")
    diff.add_argument("--rtol", type=float, default=0.0, help="relative difference of values that counts as none")
    diff.add_argument("--atol", type=float, default=0.0, help="absolute difference of values that counts as none")
    for action in (show, convert, diff):
        action.add_argument("--pickled", action="store_true", help=PICKLED)
    try:
        given = parser.parse_args(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    if given.action is None:
        parser.print_help()
        return 2
    try:
        if given.action == "show":
            return max([_show(path, given.all, given.pickled) for path in given.paths])
        if given.action == "convert":
            if given.to == "huggingface":
                return _to_pretrained(given)
            return _convert(given.source, given.target, given.to, given.pickled)
        both = [_read(path, given.pickled) for path in given.paths]
        return _diff(both, given.all, given.rtol, given.atol)
    except (CorruptCheckpoint, OSError) as error:
        print(f"lockstep checkpoint: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        return 2


def _read(path: str, pickled: bool) -> dict[str, Any]:
    if path.endswith(WEIGHTS):
        return {"state_dict": _safetensors().load_file(path)}
    return sharded.load(path, "cpu", False if pickled else None)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "safetensors", f"lockstep checkpoint with a file named *{WEIGHTS}") from None


# -- show ----------------------------------------------------------------------------------------------------


def _show(path: str, everything: bool, pickled: bool) -> int:
    """Print what is in a checkpoint; gives 1 where it is damaged."""
    print(f"{path}:")
    try:
        found = _read(path, pickled) if path.endswith(WEIGHTS) else sharded.outline(path, False if pickled else None)
    except CorruptCheckpoint as error:
        print(f"  damaged: {error}")
        return 1
    for line in _lines(path, found, everything):
        print(f"  {line}")
    return 0


def _lines(path: str, found: dict[str, Any], everything: bool) -> Iterator[str]:
    own = found.get(format.KEY) or {}
    yield f"kind: {_kind(path)}"
    yield from _writer(found, own)
    hashed = storage.is_index_folder(path) if sharded.is_sharded(path) else own
    yield "hashes: hold" if hashed else "hashes: none"
    for key in ("epoch", "global_step"):
        if key in found:
            yield f"{key}: {found[key]}"
    yield from _weights(found.get("state_dict") or {}, everything)
    yield from _optimizers(found, own.get("optimizers", []))
    if found.get("callbacks"):
        yield f"callbacks: {', '.join(map(str, found['callbacks']))}"
    if "optimizer_states" not in found:
        yield "no optimizers: a fit cannot go on from here"


def _writer(found: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    writer = own.get("writer") or {}
    if writer:
        yield f"written by: {writer['strategy']} on {writer['world']} rank(s), torch {writer['torch']}"
    elif "pytorch-lightning_version" in found:
        yield f"written by: {'lockstep' if own else 'Lightning ' + str(found['pytorch-lightning_version'])}"


def _weights(weights: dict[str, Any], everything: bool) -> Iterator[str]:
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    yield f"parameters and buffers: {len(tensors)}, {_size(sum(each.nbytes for each in tensors.values()))}"
    shown = list(tensors.items()) if everything else list(tensors.items())[:SHOWN]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"  {name:<{width}}  {tuple(value.shape)!s:<16} {_dtype(value):<10} {_size(value.nbytes)}"
    if len(shown) < len(tensors):
        yield f"  and {len(tensors) - len(shown)} more (--all)"


def _optimizers(found: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    for number, state in enumerate(found.get("optimizer_states") or []):
        inner = [value for each in state.get("state", {}).values() for value in each.values()]
        size = sum(value.nbytes for value in inner if isinstance(value, Tensor))
        name = names[number] if number < len(names) else "optimizer"
        yield f"{name}: states of {len(state.get('state', {}))} parameters, {_size(size)}"


def _kind(path: str) -> str:
    if not sharded.is_sharded(path):
        return f"one file, {_size(storage.size(path))}"
    of = " of DeepSpeed's" if deepspeed_folder.is_engines(path) else ""
    sizes = storage.sizes(path)
    return f"folder of {len(sizes)} files{of}, {_size(sum(sizes.values()))}"


def _size(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- convert -------------------------------------------------------------------------------------------------


def _convert(source: str, target: str, kind: str | None, pickled: bool) -> int:
    if storage.exists(target):
        raise MisconfigurationException(f"lockstep checkpoint convert: {target!r} is there already: choose a new name")
    if target.endswith(WEIGHTS):
        _safetensors()
    elif kind == "deepspeed" and find_spec("deepspeed") is None:
        raise missing_extra("deepspeed", "deepspeed", "lockstep checkpoint convert --to deepspeed")
    found = _read(source, pickled)
    if "state_dict" not in found:
        raise MisconfigurationException(f"lockstep checkpoint convert: {source!r} has no 'state_dict'")
    if kind is None:
        kind = "file" if sharded.is_sharded(source) and not deepspeed_folder.is_engines(source) else "parts"
    _write(found, target, kind)
    print(f"{target}: {_kind(target)}")
    return 0


def _write(found: dict[str, Any], target: str, kind: str) -> None:
    """Write a checkpoint as weights alone, as a file, as a folder of DeepSpeed's or as a folder of parts."""
    if target.endswith(WEIGHTS):
        # tied weights share memory, which safetensors refuses
        tensors = {n: v.detach().clone().contiguous() for n, v in found["state_dict"].items() if isinstance(v, Tensor)}
        encoded = _safetensors().save(tensors)
        with storage.replacing(target) as file:
            file.write(encoded)
    elif kind == "file":
        format.save(found, target)
    elif kind == "deepspeed":
        about = {key: found.get(key) for key in ("epoch", "global_step")}
        sharded.write_by(lambda folder: deepspeed_folder.write(found, folder), about, target)
    else:
        parts = sharded.split(found)
        sharded.write(parts, sharded.plan(parts, 0), target)


def _to_pretrained(given: argparse.Namespace) -> int:
    """Write the model of a checkpoint as a folder for ``from_pretrained``."""
    if given.config is None:
        raise MisconfigurationException(
            "lockstep checkpoint convert --to huggingface: give --config FOLDER, which has the model's config.json"
        )
    if storage.exists(given.target):
        raise MisconfigurationException(
            f"lockstep checkpoint convert: {given.target!r} is there already: choose a new name"
        )
    export.check_tokenizer(given.tokenizer)
    found = _read(given.source, given.pickled)
    if "state_dict" not in found:
        raise MisconfigurationException(f"lockstep checkpoint convert: {given.source!r} has no 'state_dict'")
    base = frozen.base_of(found)
    export.write_state(given.target, found["state_dict"], given.config, given.max_shard_size, given.tokenizer, base)
    sizes = storage.sizes(given.target)
    print(f"{given.target}: folder of {len(sizes)} files, {_size(sum(sizes.values()))}")
    return 0


# -- diff ----------------------------------------------------------------------------------------------------


def _diff(both: list[dict[str, Any]], everything: bool, rtol: float, atol: float) -> int:
    """Print what differs; gives 1 if anything does."""
    if not everything:
        only_weights = any("optimizer_states" not in found for found in both)
        keys = ("state_dict",) if only_weights else ALIKE
        both = [{key: found[key] for key in keys if key in found} for found in both]
    lines = list(_differences(both[0], both[1], "", rtol, atol))
    print("\n".join(lines) if lines else "equal")
    return 1 if lines else 0


def _differences(one: Any, other: Any, name: str, rtol: float, atol: float) -> Iterator[str]:
    """A line for each key that one of two trees lacks, and for each value that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        yield from _differences_by_key(one, other, name, rtol, atol)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} entries"
        for at, (here, there) in enumerate(zip(one, other, strict=False)):
            yield from _differences(here, there, f"{name}.{at}", rtol, atol)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        said = _difference(one, other, rtol, atol)
        if said:
            yield f"{name}: {said}"
    elif isinstance(one, Tensor) or isinstance(other, Tensor) or _is_other(one, other):
        yield f"{name}: {_short(one)} and {_short(other)}"


def _differences_by_key(
    one: dict[Any, Any], other: dict[Any, Any], name: str, rtol: float, atol: float
) -> Iterator[str]:
    for key in {**one, **other}:
        inner = f"{name}.{key}" if name else str(key)
        if key not in other or key not in one:
            yield f"{inner}: only in the {'first' if key in one else 'second'}"
        else:
            yield from _differences(one[key], other[key], inner, rtol, atol)


def _is_other(one: Any, other: Any) -> bool:
    """Whether two plain values differ; one nan is as the other."""
    return bool(one != other and not (one != one and other != other))


def _difference(one: Tensor, other: Tensor, rtol: float, atol: float) -> str:
    """What differs between two tensors; nothing where their bits are the same, or their values near enough."""
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"dtype {_dtype(one)} and {_dtype(other)}"
    bits = [as_bytes(each) for each in (one, other)]
    if torch.equal(bits[0], bits[1]):
        return ""
    if (rtol or atol) and torch.allclose(one, other, rtol, atol, equal_nan=True):
        return ""
    apart = bits[0].ne(bits[1]).reshape(-1, one.element_size()).any(1)
    far = ""
    if one.dtype is not torch.bool:
        wide = torch.complex128 if one.is_complex() else torch.float64
        gaps = (one.to(wide) - other.to(wide)).abs()
        alone = int((one.isnan() != other.isnan()).sum())
        far = f", by {gaps[~gaps.isnan()].max().item():.3g} at most" if not gaps.isnan().all() else ""
        far += f"; {alone} are NaN in one of the two" if alone else ""
    return f"{int(apart.sum())} of {one.numel()} values differ{far}"


def _short(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
