"""``lockstep checkpoint``: show a checkpoint, convert it to another format, or compare two checkpoints."""

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
from lockstep.cli.run import CommandParser
from lockstep.ground.comm import as_bytes
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, missing_extra
from lockstep.memory.meter import readable

ABOUT = """\
Show the content of a checkpoint, convert it to another format, or compare two checkpoints. A checkpoint is a file, a
folder of parts, or weights in safetensors.
"""
WEIGHTS = ".safetensors"
KINDS = ("file", "parts", "deepspeed", "huggingface")
PICKLED = "read files that may run code (weights_only=False), such as DeepSpeed's; only from an author you trust"
COMPARED = (
    "epoch",
    "global_step",
    "state_dict",
    "optimizer_states",
    "lr_schedulers",
    "hyper_parameters",
    "MixedPrecision",
)
"""Keys that `diff` compares by default, because they do not depend on the machine or the number of ranks."""
SHOWN = 40
"""Number of parameters that `show` lists without `--all`."""


def checkpoint(words: Sequence[str]) -> int:
    """Run ``lockstep checkpoint`` with the arguments ``words``, and return its exit code.

    Args:
        words: arguments that follow ``lockstep checkpoint``.

    Returns:
        0; 1 if a shown checkpoint is damaged or two compared ones differ; 2 if a file cannot be read.

    Raises:
        MisconfigurationException: the options are wrong, a package is missing, or the target exists.
    """
    parser = CommandParser("lockstep checkpoint", None, ABOUT)
    actions = parser.add_subparsers(dest="action", metavar="show|convert|diff")
    show = actions.add_parser("show", help="epoch, step, parameters, optimizers, callbacks, its writer, its hashes")
    show.add_argument("paths", nargs="+", metavar="PATH")
    show.add_argument("--all", action="store_true", help=f"all parameters, not the first {SHOWN}")
    convert = actions.add_parser(
        "convert",
        help="a folder of parts to a file; a file or DeepSpeed's folder to a folder of parts; *.safetensors: the "
        "weights alone",
    )
    convert.add_argument(
        "--to",
        choices=KINDS,
        help="format; deepspeed: a folder of its engine, for one rank; huggingface: a folder for from_pretrained",
    )
    convert.add_argument("--config", metavar="FOLDER", help="huggingface: folder with the model's config.json")
    convert.add_argument(
        "--tokenizer", metavar="FOLDER", help="huggingface: folder with a tokenizer (default: that of --config)"
    )
    convert.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="huggingface: size of a part (default: 5GB)"
    )
    convert.add_argument("source", metavar="PATH")
    convert.add_argument("target", metavar="NEW")
    diff = actions.add_parser("diff", help="differences between two; exits with 0 if there are none, else with 1")
    diff.add_argument("paths", nargs=2, metavar="PATH")
    diff.add_argument("--all", action="store_true", help="compare random states, callbacks and the writer too")
    diff.add_argument("--rtol", type=float, default=0.0, help="relative difference of values to ignore (default: 0)")
    diff.add_argument("--atol", type=float, default=0.0, help="absolute difference of values to ignore (default: 0)")
    for action in (show, convert, diff):
        action.add_argument("--pickled", action="store_true", help=PICKLED)
    given = parser.parse_args(words)
    if given.action is None:
        parser.print_help()
        return 2
    try:
        if given.action == "show":
            return max([_show(path, given.all, given.pickled) for path in given.paths])
        if given.action == "convert":
            return _convert(given)
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
    """Print the content of a checkpoint; return 1 if the checkpoint is damaged, else 0."""
    print(f"{path}:")
    try:
        # an outline has no values: a checkpoint may be larger than this machine's memory
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
    writer = own.get("writer") or {}
    if writer:
        yield f"written by: {writer['strategy']} on {writer['world']} rank(s), torch {writer['torch']}"
    elif "pytorch-lightning_version" in found:
        # lockstep writes Lightning's key too, so that Lightning can read the file
        yield f"written by: {'lockstep' if own else 'Lightning ' + str(found['pytorch-lightning_version'])}"
    # reading has checked them: a damaged file has raised
    hashed = storage.is_index_folder(path) if sharded.is_sharded(path) else own
    yield "hashes: valid" if hashed else "hashes: none"
    for key in ("epoch", "global_step"):
        if key in found:
            yield f"{key}: {found[key]}"
    yield from _weights(found.get("state_dict") or {}, everything)
    yield from _optimizers(found, own.get("optimizers", []))
    if found.get("callbacks"):
        yield f"callbacks: {', '.join(map(str, found['callbacks']))}"
    if "optimizer_states" not in found:
        yield "no optimizers: a fit cannot resume from here"


def _weights(weights: dict[str, Any], everything: bool) -> Iterator[str]:
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    yield f"parameters and buffers: {len(tensors)}, {readable(sum(each.nbytes for each in tensors.values()))}"
    shown = list(tensors.items()) if everything else list(tensors.items())[:SHOWN]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"  {name:<{width}}  {tuple(value.shape)!s:<16} {_dtype(value):<10} {readable(value.nbytes)}"
    if len(shown) < len(tensors):
        yield f"  and {len(tensors) - len(shown)} more (--all)"


def _optimizers(found: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    for number, state in enumerate(found.get("optimizer_states") or []):
        inner = [value for each in state.get("state", {}).values() for value in each.values()]
        size = sum(value.nbytes for value in inner if isinstance(value, Tensor))
        name = names[number] if number < len(names) else "optimizer"
        yield f"{name}: states of {len(state.get('state', {}))} parameters, {readable(size)}"


def _kind(path: str) -> str:
    if storage.is_file(path):
        return f"one file, {readable(storage.size(path))}"
    of = " of DeepSpeed's" if sharded.is_engines(path) else ""
    sizes = storage.sizes(path)
    return f"folder of {len(sizes)} files{of}, {readable(sum(sizes.values()))}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- convert -------------------------------------------------------------------------------------------------


def _convert(given: argparse.Namespace) -> int:
    source, target, kind = given.source, given.target, given.to
    if target.endswith(WEIGHTS) and kind != "huggingface":
        kind = "weights"
    if storage.exists(target):
        raise MisconfigurationException(f"{target!r} exists already. Choose a new name")
    # before the checkpoint is read, which may take minutes
    if kind == "weights":
        _safetensors()
    elif kind == "deepspeed" and find_spec("deepspeed") is None:
        raise missing_extra("deepspeed", "deepspeed", "lockstep checkpoint convert --to deepspeed")
    elif kind == "huggingface" and given.config is None:
        raise MisconfigurationException(
            "--to huggingface needs the model's config. Pass --config FOLDER, a folder with config.json"
        )
    found = _read(source, given.pickled)
    if "state_dict" not in found:
        raise MisconfigurationException(f"{source!r} has no 'state_dict', so there are no weights to convert")
    if kind is None:
        kind = "file" if sharded.is_sharded(source) and not sharded.is_engines(source) else "parts"
    _write(found, kind, given)
    print(f"{target}: {_kind(target)}")
    return 0


def _write(found: dict[str, Any], kind: str, given: argparse.Namespace) -> None:
    """Write a checkpoint to ``given.target`` in the format ``kind``, such as "file" or "huggingface"."""
    target = given.target
    if kind == "weights":
        # clones, because tied weights share memory, which safetensors refuses
        tensors = {n: v.detach().clone().contiguous() for n, v in found["state_dict"].items() if isinstance(v, Tensor)}
        encoded = _safetensors().save(tensors)
        with storage.replacing(target) as file:
            file.write(encoded)
    elif kind == "file":
        format.save(found, target)
    elif kind == "deepspeed":
        about = {key: found.get(key) for key in ("epoch", "global_step")}
        sharded.write_by(lambda folder: sharded.engine_folders().write(found, folder), about, target)
    elif kind == "huggingface":  # the model alone
        base = frozen.base_of(found)
        export.write_state(target, found["state_dict"], given.config, given.max_shard_size, given.tokenizer, base)
    else:
        parts = sharded.split(found)
        sharded.write(parts, sharded.plan(parts, 0), target)


# -- diff ----------------------------------------------------------------------------------------------------


def _diff(both: list[dict[str, Any]], everything: bool, rtol: float, atol: float) -> int:
    """Print the differences between two checkpoints; return 1 if they differ, else 0."""
    if not everything:
        # a file of weights has nothing else to compare
        only_weights = any("optimizer_states" not in found for found in both)
        keys = ("state_dict",) if only_weights else COMPARED
        both = [{key: found[key] for key in keys if key in found} for found in both]
    lines = list(_differences(both[0], both[1], "", rtol, atol))
    print("\n".join(lines) if lines else "equal")
    return 1 if lines else 0


def _differences(one: Any, other: Any, name: str, rtol: float, atol: float) -> Iterator[str]:
    """Compare two nested values. Yield a line for each key that only one has, and for each value that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:  # the first's order, then keys that only the second has
            inner = f"{name}.{key}" if name else str(key)
            if key not in other or key not in one:
                yield f"{inner}: only in the {'first' if key in one else 'second'}"
            else:
                yield from _differences(one[key], other[key], inner, rtol, atol)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} entries"
        for at, (here, there) in enumerate(zip(one, other, strict=False)):
            yield from _differences(here, there, f"{name}.{at}", rtol, atol)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        difference = _difference(one, other, rtol, atol)
        if difference:
            yield f"{name}: {difference}"
    # nan differs from itself: two of them count as equal
    elif isinstance(one, Tensor) or isinstance(other, Tensor) or (one != other and (one == one or other == other)):
        yield f"{name}: {_short(one)} and {_short(other)}"


def _difference(one: Tensor, other: Tensor, rtol: float, atol: float) -> str:
    """Describe how two tensors differ; return ``""`` if their bits are equal, or their values within the tolerances."""
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"dtype {_dtype(one)} and {_dtype(other)}"
    # bits and not values: nan differs from itself, and -0.0 equals 0.0
    bits = [as_bytes(each) for each in (one, other)]
    near = bool(rtol or atol) and torch.allclose(one, other, rtol, atol, equal_nan=True)
    if near or torch.equal(bits[0], bits[1]):
        return ""
    apart = bits[0].ne(bits[1]).reshape(-1, one.element_size()).any(1)
    wide = torch.complex128 if one.is_complex() else torch.float64
    gaps = (one.to(wide) - other.to(wide)).abs()
    return f"{int(apart.sum())} of {one.numel()} values differ, by {gaps.max().item():.3g} at most"


def _short(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
