"""What a run of a program shows, in a form that can be compared across packages."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Event = tuple[str, dict[str, Any]]


class Planted(RuntimeError):
    """Raised by a program on purpose."""


@dataclass
class Record:
    """What a run showed.

    Attributes:
        events: what was called, in order, with what could be seen then.
        ends: what each call of the Trainer returned or raised, and what could be seen after it.
        rows: what the recording logger was given.
        files: the names of the files, and of CSV files the rows.
        checkpoints: the keys of each checkpoint, and its plain values.
        warned: the warnings that were given, by class and text.
    """

    events: list[Event] = field(default_factory=list)
    ends: list[Event] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    warned: set[tuple[str, str]] = field(default_factory=set)


def plain(value: Any, root: str = "") -> Any:
    """A value in a form that can be compared across packages."""
    if isinstance(value, Tensor):
        return plain(value.detach().float().tolist())
    if isinstance(value, bool) or value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        text = value.replace(root, "<root>") if root else value
        return str.__str__(text)
    if isinstance(value, dict):
        return {str(key): plain(item, root) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, root) for item in value]
    if isinstance(value, Path):
        return plain(str(value), root)
    if isinstance(value, torch.optim.Optimizer):
        return [
            kind.__name__ for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS) if isinstance(value, kind)
        ]
    if isinstance(value, BaseException):
        return type(value).__name__ if isinstance(value, (Planted, KeyboardInterrupt)) else "exception"
    if callable(value) and not isinstance(value, nn.Module):
        return "callable"
    return re.sub("^(Lightning|Lockstep)", "", type(value).__name__)


def kinds(error: BaseException) -> list[str]:
    """The classes of an exception by which users may catch it."""
    general = ("object", "BaseException", "Exception")
    return [kind.__name__ for kind in type(error).__mro__ if kind.__name__ not in general]


def digest(module: nn.Module) -> str:
    """The bits of a module's weights and buffers."""
    found = hashlib.sha1()
    for name, value in module.state_dict().items():
        found.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:10]


def checkpoint_facts(path: Path) -> dict[str, Any]:
    held = torch.load(path, weights_only=False)
    state = held.get("state_dict", {})
    rates = [[group.get("lr") for group in part.get("param_groups", [])] for part in held.get("optimizer_states", [])]
    return {
        "keys": sorted(key for key in held if key != "lockstep" and not key.endswith("hyper_parameters_classes")),
        "epoch": held.get("epoch"),
        "global_step": held.get("global_step"),
        "weights": {key: plain(value) for key, value in state.items()},
        "rates": rates,
        "schedulers": [part.get("last_epoch") for part in held.get("lr_schedulers", [])],
        "callbacks": sorted(re.sub(r"\{.*", "", key).split(".")[-1] for key in held.get("callbacks", {})),
        "hyper_parameters": plain(held.get("hyper_parameters")),
    }


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def same(theirs: Any, ours: Any) -> bool:
    """Whether two plain values are equal; logged numbers may differ by the rounding of a sum in float32."""
    if isinstance(theirs, bool) or isinstance(ours, bool):
        return theirs is ours
    if isinstance(theirs, (int, float)) and isinstance(ours, (int, float)):
        if math.isnan(theirs) or math.isnan(ours):
            return math.isnan(theirs) and math.isnan(ours)
        return math.isclose(theirs, ours, rel_tol=2e-6, abs_tol=1e-9)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(same(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    return bool(theirs == ours)


def look_at_files(record: Record, root: Path) -> None:
    """Note the files below a folder, the rows of CSV files, and what is in checkpoints."""
    for path in sorted(root.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = str(path.relative_to(root))
        record.files[name] = "link" if path.is_symlink() else "file"
        if path.suffix == ".csv":
            with path.open() as file:
                record.files[name] = [
                    {k: number(v) for k, v in row.items() if v not in ("", None)} for row in csv.DictReader(file)
                ]
        if path.suffix == ".ckpt" and path.is_file():
            record.checkpoints[name] = checkpoint_facts(path)
