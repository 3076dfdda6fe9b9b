"""Hyperparameters of any kind as dicts, as JSON's values and as YAML."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


def as_dict(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """`params` (a mapping, Namespace or None) as a new dict."""
    return dict(vars(params) if isinstance(params, Namespace) else params or {})


def flattened(params: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """A nested mapping as a flat one: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``; lists of mappings too."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{above}/{key}" if above else str(key)
        inner = _nested(value)
        if isinstance(inner, list) and inner and all(isinstance(item, Mapping) for item in inner):
            inner = dict(enumerate(inner))
        flat.update(flattened(inner, name) if isinstance(inner, Mapping) else {name: value})
    return flat


def _nested(value: object) -> Any:
    """Namespaces and dataclasses as dicts, all else as it is."""
    if isinstance(value, Namespace):
        return vars(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_json(value: object) -> Any:
    """`value` in JSON's words: numbers of NumPy and torch as numbers, functions and classes by name, else ``str``."""
    inner = _nested(value)
    if isinstance(inner, Mapping):
        return {str(key): as_json(item) for key, item in inner.items()}
    if isinstance(inner, (list, tuple, set, frozenset)):
        return [as_json(item) for item in inner]
    if getattr(inner, "ndim", None) == 0 and hasattr(inner, "item"):
        inner = inner.item()
    if inner is None or type(inner) in (bool, int, float, str):
        return inner
    if callable(inner) and hasattr(inner, "__name__"):
        return inner.__name__
    return str(inner)


def write_hparams(folder: str, params: Mapping[Any, Any], name: str = "hparams.yaml") -> None:
    """Write `params` to the YAML file `name` in `folder`, which is made."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, name).write_text(as_yaml(params), encoding="utf-8")


def as_yaml(params: Mapping[Any, Any]) -> str:
    """`params` as YAML; what YAML has no word for is written as ``str`` of it. PyYAML is not needed."""
    return "".join(f"{line}\n" for line in _yaml_lines(params)) or "{}\n"


def _yaml_lines(params: Mapping[Any, Any]) -> list[str]:
    lines = []
    for key, value in params.items():
        inner = _nested(value)
        if isinstance(inner, Mapping) and inner:
            lines += [f"{_yaml_scalar(key)}:", *(f"  {line}" for line in _yaml_lines(inner))]
        else:
            lines.append(f"{_yaml_scalar(key)}: {_yaml_flow(inner)}")
    return lines


def _yaml_flow(value: object) -> str:
    inner = _nested(value)
    if isinstance(inner, Mapping):
        return "{" + ", ".join(f"{_yaml_scalar(key)}: {_yaml_flow(item)}" for key, item in inner.items()) + "}"
    if isinstance(inner, (list, tuple, set, frozenset)):
        return "[" + ", ".join(map(_yaml_flow, inner)) + "]"
    return _yaml_scalar(inner)


#: strings that need no quotes: they begin with a letter and are no other word of YAML's
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null|none)$)[A-Za-z_][\w./-]*", re.IGNORECASE | re.ASCII)


def _yaml_scalar(value: object) -> str:
    if isinstance(value, Enum):
        value = value.name
    elif getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(float(value))
        if text in ("inf", "-inf", "nan"):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        # to YAML 1.1, 1e-05 is a string
        return text if "." in text else text.replace("e", ".0e")
    text = value if isinstance(value, str) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
