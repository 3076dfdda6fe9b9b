"""Errors that come of devices, in the user's words: a tensor that was left on the CPU, an operation that is missing."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from itertools import chain
from types import FrameType

import torch
from torch import Tensor, nn

from lockstep.ground.errors import words_of
from lockstep.module import LightningModule
from lockstep.supervise.screen_text import name_cells
from lockstep.supervise.stack import Frame

APART = re.compile(
    r"(?:Expected all tensors|tensors? (?:is|to be|are expected to be)) on (?:the )?same device"
    r"|Input type \(.*\) and weight type \(.*\) should be the same"
    r"|Tensor for argument .* is on cpu but expected on|Placeholder storage has not been allocated on MPS"
    r"|indices should be either on|found two different devices"
)
"""What torch says where an operation gets tensors of several devices."""

MISSING = (
    re.compile(r"Could not run '(?P<op>[\w:.]+)' with arguments from the '(?P<backend>[A-Za-z0-9]+)' backend"),
    re.compile(
        r"The operator '(?P<op>[\w:.]+)' is not currently (?:implemented|supported) (?:for|on) the (?P<backend>\w+)"
    ),
    re.compile(r"\"(?P<op>\w+)\" not implemented for '(?P<dtype>\w+)'"),
)
"""What it says where a device has no such operation, or none for a dtype."""

SHOWN = 3
"""So many names are told."""


def device_error(module: LightningModule, error: BaseException) -> str | None:
    """The sentence for an error that comes of devices; None for all others.

    Args:
        module: of the call, on its device.
        error: as it was raised, with its traceback.
    """
    if not isinstance(error, RuntimeError):
        return None
    text, frames = words_of(error), _frames(error)
    if APART.search(text):
        return _left_behind(module, text, frames)
    found = next((match for form in MISSING if (match := form.search(text))), None)
    if found is None or "Sparse" in found.groupdict().get("backend", ""):
        return None
    return _missing(module, found, text, frames)


def _left_behind(module: LightningModule, text: str, frames: list[tuple[FrameType, int]]) -> str | None:
    device = module.device
    users = [(frame, line) for frame, line in frames if _is_users(frame, line)]
    if not users or device.type == "cpu":
        return None
    frame, line = users[-1]
    names = list(dict.fromkeys(name for name, value in _tensors(frame) if value.device.type == "cpu"))
    which = f": on the CPU {'is' if len(names) == 1 else 'are'} {', '.join(names[:SHOWN])}" if names else ""
    return (
        f"{type(module).__name__}: {_place(frame, line)} puts tensors of several devices into one operation{which}. "
        f"The module and its batches are on {device}: make a tensor there (`torch.zeros(3, device=self.device)`, "
        "`torch.zeros_like(x)`), keep one that the module holds by `self.register_buffer(name, tensor)`, and give a "
        f"batch class a method `to(device)`. (torch: {text})"
    )


def _missing(module: LightningModule, found: re.Match[str], text: str, frames: list[tuple[FrameType, int]]) -> str:
    layers = {id(layer): name for name, layer in module.named_modules()}
    caller = next(
        (value for frame, _ in reversed(frames) if isinstance(value := frame.f_locals.get("self"), nn.Module)), None
    )
    users = [(frame, line) for frame, line in frames if _is_users(frame, line)]
    where = f" ({_place(*users[-1])})" if users else ""
    if caller is None:
        by = "a backward or the optimizer needs"
    else:
        name = layers.get(id(caller))
        by = f"layer {name!r} ({type(caller).__name__}) calls" if name else f"{type(caller).__name__} calls"
    kind, dtype = module.device.type, found.groupdict().get("dtype")
    lacks = f"has no {found['op']!r}" + (f" for {dtype}" if dtype else "")
    ways = [
        "take another operation or layer",
        "another Trainer(precision=...)" if dtype else "run that layer on the CPU",
    ]
    if kind == "mps":
        ways.append("set PYTORCH_ENABLE_MPS_FALLBACK=1, by which torch does it on the CPU")
    if kind != "cpu":
        ways.append('or Trainer(accelerator="cpu")')
    first = next(iter(text.splitlines()), "")
    return (
        f"{type(module).__name__}: torch {torch.__version__} {lacks} on {kind!r} devices, which {by}{where}: "
        f"{', '.join(ways)}. (torch: {first:.200})"
    )


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Frames and lines through which an error came, the innermost last."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_users(frame: FrameType, line: int) -> bool:
    return Frame(frame.f_code.co_filename, line, frame.f_code.co_name).is_users


def _place(frame: FrameType, line: int) -> str:
    """``model.py:12: x + self.scale``."""
    file = frame.f_code.co_filename
    source = linecache.getline(file, line, frame.f_globals).strip()
    return name_cells(f"{file}:{line}") + (f", `{source:.100}`," if source else "")


def _tensors(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a function, and of the modules among its variables, as the user names them."""
    for name, value in frame.f_locals.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            for key, each in chain(vars(value).items(), value.named_parameters(), value.named_buffers()):
                if isinstance(each, Tensor):
                    yield f"{name}.{key}", each
