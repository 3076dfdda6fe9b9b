"""Report of a rank's memory use by kind, and of the memory of saved activations by layer, in bytes.

    activations = Activations(model)
    with activations.counting():
        loss = model(batch).sum()
    print(MemoryUse.of({"parameters": list(model.parameters())}, activations=activations))

Each storage counts once: two views of one storage are not counted twice.
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
    "buckets": "buckets, without the gradients in them",
    "hook_state": "state of the communication hook",
    "gathered": "gathered parameters",
    "activations": "activations",
}
"""Attribute of `MemoryUse` -> label for this kind of memory in the printed table."""

SHOWN = 5
"""Maximum number of layers in the printed table."""

# -- bytes ---------------------------------------------------------------------------------------------------


def readable(count: float) -> str:
    """Format a number of bytes with a unit.

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
    """Return the tensors that store a tensor's data: a DTensor's local part, a sparse tensor's indices and values."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def _key(tensor: Tensor) -> tuple[int, int]:
    """Return (key, size): a number that identifies a tensor's storage, and the storage's size in bytes."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors
        return -id(tensor), tensor.numel() * tensor.element_size()
    return storage._cdata, storage.nbytes()


def bytes_by_kind(held: Mapping[str, Iterable[Tensor]], device: str) -> tuple[dict[str, int], int]:
    """Return (by_kind, other): bytes of each kind of memory on devices of type ``device``, and all other bytes.

    Args:
        held: tensors by kind; a tensor may occur several times. A storage counts for the first kind in which it
            occurs. A gradient in a bucket counts as a gradient, and the rest of the bucket as a bucket.
        device: type of the run's device.
    """
    found: dict[str, int] = dict.fromkeys(held, 0)
    # storages, not tensors: a gradient in a bucket is a view with the storage of the whole bucket
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
    """Counter of the bytes that forwards save for their backwards, by layer, inside `counting`.

    A storage counts once, for the layer that saved it first. Parameters, buffers, and memory that was released before
    the peak do not count.

    Args:
        module: the module with the layers.
        gathered: function that returns the parameters gathered now, which are counted separately.

    Attributes:
        layers: bytes by layer at the peak, largest first.
        gathered: bytes of gathered parameters at the peak.
        names: names of the layers, by their ids.
        samples: number of samples in the counted micro-batch, if the caller has set it.
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
        """Bytes of activations of all layers at the peak."""
        return sum(self.layers.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the activations that forwards inside the block save."""
        lacking = missing(MEMORY)
        if lacking:
            warn_once(f"trainer.memory() omits activations: torch {torch.__version__} has no {lacking[0].name}.")
            yield
            return
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        graph = torch.autograd.graph
        # the transforms of `torch.func` call it, and refuse hooks like these
        own, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, self._pausing  # type: ignore[assignment]
        self._own_disable = own

        def note_all(kept: object) -> None:
            for tensor in tensors_in(kept, 6):
                self._note(tensor)

        STATE.count = note_all  # selective checkpointing saves tensors without these hooks
        try:
            with graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            graph.disable_saved_tensors_hooks = own
            STATE.count = None
            for hook in hooks:
                hook.remove()
            self._running.clear()
            self.record_peak()

    @contextmanager
    def _pausing(self, message: str) -> Iterator[None]:
        """In the context, remove this object's saved-tensor hooks, then disable such hooks as torch's function does."""
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
        """Drop the records about storages at the end of a step."""
        self._kept.clear()

    def record_peak(self) -> None:
        """Record the bytes of the activations that are saved now as the peak, if they exceed the previous peak."""
        self._grows = False
        # autograd saves parameters too, which are counted as parameters
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
        # hooks are global: other modules call them too, and so do threads that replicate the module
        if name is None or threading.get_ident() != self._thread:
            return
        self._running.append(name)

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        if id(layer) in self.names and self._running and threading.get_ident() == self._thread:
            self._running.pop()

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
        if self._grows:  # at the start of a backward, which releases activations from now on
            self.record_peak()
        tensor, version = packed
        if _version(tensor) != version:  # torch makes this check only without hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {_version(tensor)}; expected version {version} "
                "instead. Find the operation that needs it with Trainer(detect_anomaly=True)."
            )
        return tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# -- the sums ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of one rank in bytes.

    Attributes:
        rank: the rank.
        device: type of the rank's device.
        parameters, gradients, optimizer_states, buffers: the model's states; this rank's shards if they are sharded.
        buckets: the reducer's buckets, without the gradients in them.
        hook_state: state of a communication hook (PowerSGD's matrices).
        gathered: parameters that FSDP has gathered at the end of the forward.
        activations: activations that the forward of a micro-batch saves for the backward; 0 if they were not counted.
        layers: activations by layer, largest first; "" is the training step itself.
        offloaded: bytes of all kinds on the CPU, if the device is not the CPU.
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
        """Create the report from a rank's tensors by kind (see `KINDS`) and its counted activations.

        Args:
            held: tensors by kind, of any shapes and dtypes; memory that several tensors share counts once.
            rank: the rank.
            device: type of the rank's device.
            activations: counted activations; None: 0 bytes.
        """
        found, offloaded = bytes_by_kind({kind: list(held.get(kind, ())) for kind in KINDS}, device)
        layers = () if activations is None else tuple(activations.layers.items())
        if activations is not None:
            found["activations"] += activations.total
            found["gathered"] = max(found["gathered"], activations.gathered)
        return cls(rank=rank, device=device, layers=layers, offloaded=offloaded, **found)

    @property
    def model_states(self) -> int:
        """Bytes of parameters, gradients, optimizer states and buckets."""
        return self.parameters + self.gradients + self.optimizer_states + self.buckets

    @property
    def total(self) -> int:
        """Bytes of all kinds, without offloaded memory."""
        return sum(getattr(self, kind) for kind in KINDS)

    def line(self) -> str:
        """Return a summary in one line, for a log."""
        used = sorted(((getattr(self, kind), kind.replace("_", " ")) for kind in KINDS), reverse=True)
        kinds = ", ".join(f"{name} {readable(size)}" for size, name in used if size)
        most = next((f" (most in {name})" for name, _ in self.layers if name), "")
        return f"memory of rank {self.rank}: {readable(self.total)}: {kinds}{most}"

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
