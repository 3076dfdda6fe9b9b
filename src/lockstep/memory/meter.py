"""What a rank's memory is used for, in bytes, and what a forward keeps for its backward, by layer.

    activations = Activations(model)
    with activations.counting():
        loss = model(batch).sum()
    print(MemoryUse.of({"parameters": list(model.parameters())}, activations=activations))

Everything is counted by storage, each once: two views of one memory are one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.ground.parameters import plain_name
from lockstep.ground.rank import warn_once
from lockstep.ground.torch_support import MEMORY, missing
from lockstep.ground.tree import tensors_in
from lockstep.memory.recompute import STATE

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "buffers": "buffers",
    "buckets": "buckets, beside the gradients in them",
    "hook_state": "state of the communication hook",
    "gathered": "gathered parameters",
    "activations": "activations",
}
"""The kinds of memory, by the attribute of `MemoryUse`."""

SHOWN = 5
"""Layers that the printed table shows."""

# -- bytes ---------------------------------------------------------------------------------------------------


def readable(count: float) -> str:
    """Bytes as people read them.

    Example:
        >>> readable(1536), readable(3 * 2**30)
        ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors in whose memory the values are: this rank's part of a DTensor, a sparse one's indices and values."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def _key(tensor: Tensor) -> tuple[int, int]:
    """What tells a tensor's memory from others, and the bytes there."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a class that wraps others
        return -id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()


def bytes_by_kind(held: Mapping[str, Iterable[Tensor]], device: str) -> tuple[dict[str, int], int]:
    """The bytes of each kind, and those of all kinds that are on the CPU while ``device`` is another.

    Args:
        held: by kind; a tensor may be there several times. Memory belongs to the first kind that has it; but of a
            gradient that lies in a bucket its own bytes count as gradients, and the bucket's others as buckets.
        device: type of the run's device.
    """
    found: dict[str, int] = dict.fromkeys(held, 0)
    buckets = {_key(part)[0] for tensor in held.get("buckets", ()) for part in parts_of(tensor)}
    seen: set[object] = set()
    in_buckets = offloaded = 0
    for kind, tensors in held.items():
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            key, size = _key(part)
            if key in buckets and kind == "gradients":
                if (view := (key, part.storage_offset())) not in seen:
                    seen.add(view)
                    found[kind] += part.numel() * part.element_size()
                    in_buckets += part.numel() * part.element_size()
            elif key not in seen and not part.is_meta:
                seen.add(key)
                if part.device.type == device:
                    found[kind] += size
                else:
                    offloaded += size
    if buckets:
        found["buckets"] -= in_buckets
    return found, offloaded


# -- activations ---------------------------------------------------------------------------------------------


class Activations:
    """Counts what forwards keep for their backwards, by layer, while it is told to; afterwards it costs nothing.

    Memory counts once, for the layer that kept it first. Parameters and buffers do not count, nor what was given back
    by the time of the peak.

    Args:
        module: whose layers are told apart.
        gathered: gives parameters that are gathered for a while, which count by themselves.

    Attributes:
        layers: bytes by layer, largest first, at the peak.
        gathered: bytes of gathered parameters then.
        names: of the layers, by their ids.
        samples: of the micro-batch that was counted, where somebody has said so.
    """

    def __init__(self, module: nn.Module, gathered: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.layers: dict[str, int] = {}
        self.gathered = 0
        self._gathered = gathered
        self.samples: float | None = None
        self._module = module
        self.names = {id(layer): plain_name(name) for name, layer in module.named_modules()}
        self._running: list[str] = []
        self._thread = threading.get_ident()
        self._kept: dict[int, tuple[StorageWeakRef, str]] = {}
        self._grows = False

    @property
    def total(self) -> int:
        """Bytes of all layers at the peak."""
        return sum(self.layers.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, what is kept counts."""
        lacking = missing(MEMORY)
        if lacking:
            warn_once(f"trainer.memory() counts no activations: torch {torch.__version__} has no {lacking[0].name}.")
            yield
            return
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        graph = torch.autograd.graph
        own, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, self._pausing  # type: ignore[assignment]
        self._own_disable = own
        STATE.kept = self._note_all
        try:
            with graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            graph.disable_saved_tensors_hooks = own
            STATE.kept = None
            for hook in hooks:
                hook.remove()
            self._running.clear()
            self.look()

    @contextmanager
    def _pausing(self, message: str) -> Iterator[None]:
        """In place of torch's function: the transforms of ``torch.func`` refuse hooks like these, so they pause."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        mine = top is not None and top[0] == self._pack
        if mine:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with self._own_disable(message):
                yield
        finally:
            if mine:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """The step is over: let go of what was kept."""
        self._kept.clear()

    def look(self) -> None:
        """Take what is kept now for the peak, if it is more than before."""
        self._grows = False
        gathered = dict(_key(part) for tensor in self._gathered() for part in parts_of(tensor))
        own = {_key(part)[0] for tensor in self._others() for part in parts_of(tensor)} | gathered.keys()
        found: dict[str, int] = defaultdict(int)
        for key, (reference, layer) in list(self._kept.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._kept[key]
            elif key not in own:
                found[layer] += storage.nbytes()
        if sum(found.values()) > self.total:
            self.layers = dict(sorted(found.items(), key=lambda item: -item[1]))
            self.gathered = sum(gathered.values())

    def _others(self) -> Iterator[Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()

    def _enter(self, layer: nn.Module, args: Any) -> None:
        name = self.names.get(id(layer))
        if name is None or threading.get_ident() != self._thread:
            return
        self._running.append(name)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        if id(layer) in self.names and self._running and threading.get_ident() == self._thread:
            self._running.pop()

    def _note_all(self, kept: object) -> None:
        for tensor in tensors_in(kept, 6):
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        for part in parts_of(tensor):
            key, _ = _key(part)
            before = self._kept.get(key)
            if key >= 0 and (before is None or before[0].expired()):
                layer = self._running[-1] if self._running else ""
                self._kept[key] = (StorageWeakRef(part.untyped_storage()), layer)
                self._grows = True

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        self._note(tensor)
        return tensor, _version(tensor)

    def _unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        if self._grows:  # a backward begins: this is the most that there will be
            self.look()
        tensor, version = packed
        if _version(tensor) != version:  # torch looks for it where there are no hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {_version(tensor)}; expected version {version} "
                "instead. Trainer(detect_anomaly=True) names the operation that needs it."
            )
        return tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# -- all of it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """What one rank's memory is used for, in bytes.

    Attributes:
        rank: whose memory.
        device: its type.
        parameters, gradients, optimizer_states, buffers: as their names say; of shards this rank's.
        buckets: the reducer's, beside the gradients that lie in them.
        hook_state: what a communication hook remembers (PowerSGD's matrices).
        gathered: parameters that FSDP has gathered when the forward has ended.
        activations: what the forward of a micro-batch keeps for the backward; 0 where nobody has counted.
        layers: the activations by layer, largest first; "" is the training step itself.
        offloaded: bytes of all kinds on the CPU, where the device is another.
    """

    rank: int = 0
    device: str = "cpu"
    parameters: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    buffers: int = 0
    buckets: int = 0
    hook_state: int = 0
    gathered: int = 0
    activations: int = 0
    layers: tuple[tuple[str, int], ...] = ()
    offloaded: int = 0

    @classmethod
    def of(
        cls,
        held: Mapping[str, Iterable[Tensor]],
        *,
        rank: int = 0,
        device: str = "cpu",
        activations: Activations | None = None,
    ) -> MemoryUse:
        """Of tensors by kind, as in `KINDS`, and of activations."""
        found, offloaded = bytes_by_kind({kind: list(held.get(kind, ())) for kind in KINDS}, device)
        layers = () if activations is None else tuple(activations.layers.items())
        if activations is not None:
            found["activations"] += activations.total
            found["gathered"] = max(found["gathered"], activations.gathered)
        return cls(rank=rank, device=device, layers=layers, offloaded=offloaded, **found)

    @property
    def model_states(self) -> int:
        """Parameters, gradients, optimizer states, and the buckets around gradients."""
        return self.parameters + self.gradients + self.optimizer_states + self.buckets

    @property
    def total(self) -> int:
        """All kinds together, without what is offloaded."""
        return sum(getattr(self, kind) for kind in KINDS)

    def line(self) -> str:
        """All of it in one line, for a log."""
        used = sorted(((getattr(self, kind), kind.replace("_", " ")) for kind in KINDS), reverse=True)
        shown = ", ".join(f"{name} {readable(size)}" for size, name in used if size)
        most = next((f" (most in {name})" for name, _ in self.layers if name), "")
        return f"memory of rank {self.rank}: {readable(self.total)}: {shown}{most}"

    def __str__(self) -> str:
        rows = [(label, getattr(self, kind)) for kind, label in KINDS.items() if getattr(self, kind)]
        place = next((i + 1 for i, (label, _) in enumerate(rows) if label == "activations"), 0)
        layers = [(f"  {name or 'the step itself'}", size) for name, size in self.layers[:SHOWN]]
        if len(self.layers) > SHOWN:
            rest = self.layers[SHOWN:]
            layers.append((f"  {len(rest)} other layers", sum(size for _, size in rest)))
        rows[place:place] = layers
        rows.append(("total", self.total))
        if self.offloaded:
            rows.append(("on the CPU", self.offloaded))
        width = max(len(label) for label, _ in rows)
        head = f"memory of rank {self.rank} ({self.device})"
        return "\n".join([head, *(f"  {label:<{width}}  {readable(size):>10}" for label, size in rows)])
