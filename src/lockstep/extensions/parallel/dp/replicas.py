"""Data parallelism in one process: a batch is split over devices, and each part runs on a replica in a thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.extensions.parallel.dp.coalesced import copies_of
from lockstep.ground.device import current_device, current_of, current_stream, has_streams, in_stream
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.transfer import has_pinned_memory
from lockstep.ground.tree import tree_leaves, tree_map
from lockstep.memory.recompute import Recomputed

# -- DataParallel --------------------------------------------------------------------------------------------


class DataParallel(nn.Module):
    """Container that runs a module on several devices in one process, as ``torch.nn.DataParallel`` does.

    In each forward the batch is split along ``dim`` into parts that differ by at most one row, the module is
    replicated, each part runs in a thread, and the outputs are gathered on ``output_device``. Gradients flow back to
    the module's own parameters. The first part runs on the module itself, so states that a forward changes (such as
    BatchNorm's running statistics) are those of the first part; those of the replicas are lost.

    Unlike torch's class it accepts any devices, also the CPU, and a device may be listed several times. A batch with
    fewer rows than devices leaves the last devices idle.

    Args:
        module: the module; its parameters and buffers are on the first device.
        device_ids: the devices; default: all GPUs, or the CPU without any.
        output_device: device where the outputs are gathered; default: the first device.
        dim: dimension along which inputs are split and outputs joined.

    Raises:
        ValueError: the list of devices is empty, or a parameter or buffer is not on the first device.

    Example::

        model = DataParallel(net, device_ids=[0, 1])
        loss_fn(model(images), labels).backward()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        found: list[Any] = list(range(torch.accelerator.device_count())) or ["cpu"]
        if device_ids is not None:
            found = list(device_ids)
        self.module = module
        self.devices = [as_device(device) for device in found]
        if not self.devices:
            raise ValueError(f"DataParallel(device_ids={device_ids!r}): pass at least one device.")
        self.device_ids = found
        self.output_device = self.devices[0] if output_device is None else as_device(output_device)
        self.dim = dim
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"DataParallel: {name!r} is on {tensor.device}, but the first device is {self.devices[0]}. Move "
                    f'the module there first, by `module.to("{self.devices[0]}")`.'
                )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole batch.

        Args:
            inputs, kwargs: arguments of the module's forward; tensors are split along ``dim``, other objects are
                passed to all parts.

        Raises:
            ValueError: tensors have different numbers of rows, or the outputs cannot be joined.
        """
        parts = self.scatter((inputs, kwargs), self.devices)
        replicas = self.replicate(self.module, self.devices[: len(parts)])
        return self.gather(self.parallel_apply(replicas, parts), self.output_device)

    def replicate(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        """Return a replica of the module for each device; the first replica is the module itself.

        Args:
            module: the module, on the first device.
            devices: devices of the replicas, at most one per part of the batch.
        """
        return replicate(module, devices)

    def scatter(self, inputs: object, devices: Sequence[torch.device]) -> list[Any]:
        """Split the inputs among the devices; see :func:`scatter`. A subclass may override this method.

        Args:
            inputs: nested collections of tensors and other objects.
            devices: the devices.

        Returns:
            a list of parts of the same structure, one per device that has rows.

        Raises:
            ValueError: tensors have different numbers of rows, or one lacks the dimension ``dim``.
        """
        return scatter(inputs, devices, self.dim)

    def parallel_apply(self, replicas: Sequence[nn.Module], parts: Sequence[Any]) -> list[Any]:
        """Run each replica on its part ``(inputs, kwargs)``, and return the outputs. A subclass may override this.

        Args:
            replicas: one module per part.
            parts: a pair of positional and keyword arguments per part.
        """
        calls = [partial(replica, *i, **k) for replica, (i, k) in zip(replicas, parts, strict=True)]
        return in_threads(calls, self.devices)

    def gather(self, outputs: Sequence[Any], device: torch.device) -> Any:
        """Join the outputs of the parts; see :func:`gather`. A subclass may override this method.

        Args:
            outputs: an output per part, all of the same structure.
            device: device of the result.

        Returns:
            an output of the same structure.

        Raises:
            ValueError: the outputs cannot be joined.
        """
        return gather(outputs, device, self.dim)


def as_device(device: int | str | torch.device) -> torch.device:
    """Convert an accelerator's index, a device's name or a `torch.device` to a `torch.device`."""
    if isinstance(device, int):
        kind = torch.accelerator.current_accelerator()
        return torch.device("cuda" if kind is None else kind.type, device)
    made = torch.device(device)
    return made if made.type in ("cpu", "meta") or made.index is not None else current_of(made.type)


def rows_of(batch: object, dim: int = 0) -> int | None:
    """Return the common size along ``dim`` of the tensors in a nested batch; None if no tensor has dimensions.

    Raises:
        ValueError: the tensors have different numbers of rows, or one lacks the dimension.
    """
    leaves = [leaf for leaf in tree_leaves(batch, Tensor) if leaf.ndim]
    for leaf in leaves:
        if not -leaf.ndim <= dim < leaf.ndim:
            raise ValueError(
                f"DataParallel(dim={dim}): the batch has a tensor of shape {tuple(leaf.shape)}, without this dimension."
            )
    counts = {leaf.shape[dim] for leaf in leaves}
    if len(counts) > 1:
        raise ValueError(
            f"DataParallel: the tensors of the batch have different sizes {sorted(counts)} along dimension {dim}, "
            "which is split. Pass tensors of the same size. Pass a value for the whole batch as a tensor without "
            "dimensions."
        )
    return counts.pop() if counts else None


def part_sizes(rows: int, parts: int) -> list[int]:
    """Divide ``rows`` into at most ``parts`` parts. Return sizes that differ by at most one, largest first."""
    parts = max(1, min(rows, parts))
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def scatter(batch: object, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Split a nested batch into parts of similar size, and move one part to each device.

    Args:
        batch: tensors are split along ``dim``. Tensors without dimensions, and other objects, are in all parts.
        devices: devices of the parts; with fewer rows than devices there are fewer parts.
        dim: the dimension of the rows.
    """
    rows = rows_of(batch, dim)
    if rows is None:
        return [batch]
    sizes = part_sizes(rows, len(devices))
    parts, first = [], 0
    for size, device in zip(sizes, devices, strict=False):

        def own(tensor: Tensor, first: int = first, size: int = size, device: torch.device = device) -> Tensor:
            mine = tensor.narrow(dim, first, size) if tensor.ndim else tensor
            # not to the CPU: it would read memory before the copy has arrived
            return mine.to(device, non_blocking=has_pinned_memory(device.type))

        parts.append(tree_map(own, batch, Tensor))
        first += size
    return parts


def replicate(
    module: nn.Module, devices: Sequence[torch.device], substitute: Callable[[nn.Module], Any] | None = None
) -> list[nn.Module]:
    """Return the module itself for the first device, and a replica for each further device.

    A replica is a shallow copy of all modules. Its parameters are copies on its device through which gradients
    flow back (on the module's own device the parameters themselves); its buffers are copies.

    Args:
        module: the module, on the first device.
        devices: devices of the replicas.
        substitute: called with each submodule. A result other than None replaces the copy in all replicas.

    Raises:
        ValueError: the module is lazy and not initialized.
    """
    return [module, *(_replica(module, copies, substitute) for copies in copies_of(module, devices[1:]))]


def _replica(
    module: nn.Module, copies: Mapping[int, Tensor], substitute: Callable[[nn.Module], Any] | None
) -> nn.Module:
    made: dict[int, Any] = {}

    def copied(original: nn.Module | None) -> Any:
        if original is None:
            return None
        if id(original) not in made:
            instead = None if substitute is None else substitute(original)
            if instead is not None:
                made[id(original)] = instead
                return instead
            replica = made[id(original)] = original.__new__(type(original))
            replica.__dict__.update(original.__dict__)
            fill = replica.__dict__
            fill["_parameters"] = {key: None if p is None else copies[id(p)] for key, p in original._parameters.items()}
            fill["_buffers"] = {key: None if b is None else copies[id(b)] for key, b in original._buffers.items()}
            fill["_modules"] = {key: copied(value) for key, value in original._modules.items()}
            # a forward that recomputes activations is bound to the original layer
            if isinstance(fill.get("forward"), Recomputed):
                fill["forward"] = fill["forward"].of(replica)
        return made[id(original)]

    replica: nn.Module = copied(module)
    return replica


def in_threads(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device] = ()) -> list[Any]:
    """Run each call in its own thread (the first call in the current thread), and return the results.

    Grad mode, autocast and streams, which torch has per thread, are those of this thread.

    Args:
        calls: functions without arguments.
        devices: the current device of each call; further devices are ignored.

    Raises:
        BaseException: the error of the first call in the list that failed, with a note on its part of the batch
            (from Python 3.11 on).
    """
    # the autocast of the first device type with an active one, else the CPU's
    kinds = [device.type for device in devices if device.type != "cpu" and torch.is_autocast_enabled(device.type)]
    kind = kinds[0] if kinds else "cpu"
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    places = [place_on(device) for device in devices[: len(calls)]] or [nullcontext() for _ in calls]
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException | None] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            with places[number]:
                results[number] = calls[number]()
        except BaseException as error:
            errors[number] = error
            if number < len(devices) and hasattr(error, "add_note"):
                error.add_note(f"Raised for part {number + 1} of {len(calls)} of the batch, on {devices[number]}.")

    def thread(number: int) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
            with torch.autocast(kind, dtype=dtype, enabled=enabled):
                work(number)

    others = [threading.Thread(target=thread, args=(number,)) for number in range(1, len(calls))]
    for other in others:
        other.start()
    work(0)
    for other in others:
        other.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def place_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context for another thread, which selects ``device`` and this thread's current stream."""
    return in_stream(current_stream(device)) if has_streams(device) else current_device(device)


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of the parts. Tensors are joined along ``dim``, and containers member by member.

    Tensors without dimensions become one with an element for each part, as in torch. Lists without tensors are
    concatenated. Other objects must be equal in all parts.

    Raises:
        ValueError: the outputs cannot be joined.
    """

    def together(tensors: list[Tensor]) -> Tensor:
        moved = [tensor.to(device) for tensor in tensors]
        return torch.cat(moved, dim) if moved[0].ndim else torch.stack(moved)

    return join(outputs, together)


def join(outputs: Sequence[Any], tensors: Callable[[list[Tensor]], Any]) -> Any:
    """Join the outputs of the parts. The function ``tensors`` joins the tensors at each position."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return tensors(list(outputs))
    kinds = {type(output) for output in outputs}
    if len(kinds) > 1:
        raise ValueError(
            f"DataParallel: the replicas returned {sorted(kind.__name__ for kind in kinds)}. Return the same type "
            "for all parts."
        )
    if isinstance(first, Mapping):
        return _join_mappings(outputs, tensors)
    if isinstance(first, list | tuple):
        return _join_members(outputs, tensors)
    if hasattr(first, "__dataclass_fields__"):
        made = copy.copy(first)
        for field in first.__dataclass_fields__:
            object.__setattr__(made, field, join([getattr(output, field) for output in outputs], tensors))
        return made
    for output in outputs:
        if not _is_same(first, output):
            raise ValueError(
                f"DataParallel: the replicas returned {first!r:.60} and {output!r:.60}, which cannot be joined, so one "
                "would be lost. Return a tensor or a list."
            )
    return first


def _join_mappings(outputs: Sequence[Any], tensors: Callable[[list[Tensor]], Any]) -> Any:
    """Join mappings of the same class, key by key."""
    first = outputs[0]
    if any(output.keys() != first.keys() for output in outputs):
        raise ValueError(
            f"DataParallel: the replicas returned dicts with different keys; the first has {sorted(first)}. Return the "
            "same keys for all parts."
        )
    joined = {key: join([output[key] for output in outputs], tensors) for key in first}
    if not isinstance(first, MutableMapping):
        return type(first)(joined)
    made = copy.copy(first)  # keeps attributes, such as a default factory
    for key, value in joined.items():
        made[key] = value
    return made


def _join_members(outputs: Sequence[Any], tensors: Callable[[list[Tensor]], Any]) -> Any:
    """Join lists, tuples or named tuples by index; concatenate lists without tensors."""
    first = outputs[0]
    if isinstance(first, list) and not any(isinstance(item, Tensor | dict | list | tuple) for item in first):
        return [item for output in outputs for item in output]
    if any(len(output) != len(first) for output in outputs):
        raise ValueError(
            f"DataParallel: the replicas returned a {type(first).__name__} of {sorted({len(o) for o in outputs})} "
            "members, which are joined one by one. Return the same number for all parts."
        )
    members = [join(list(places), tensors) for places in zip(*outputs, strict=True)]
    return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)


def _is_same(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # comparing arrays gives an array
        return False


# -- devices inside of DistributedDataParallel ---------------------------------------------------------------


Device = int | str | torch.device


def as_id(device: torch.device) -> int | torch.device:
    """Return the index of an accelerator device, or the CPU device unchanged."""
    return device if device.type == "cpu" else device.index


def choose_devices(
    device_ids: Sequence[Device] | str | None, output_device: Device | None, here: torch.device
) -> tuple[list[torch.device], torch.device | None]:
    """Return (devices, device for the outputs) from a container's ``device_ids`` and ``output_device``.

    Args:
        device_ids, output_device: arguments of the container.
        here: device of its module.

    Raises:
        MisconfigurationException: the arguments do not fit each other or the module.
    """
    if isinstance(device_ids, str) and device_ids != "all":
        raise MisconfigurationException(f'device_ids={device_ids!r}: pass a list of devices, "all", or None')
    if device_ids == "all":
        device_ids = list(range(torch.accelerator.device_count())) or ["cpu"]
    devices = [as_device(device) for device in device_ids or ()]
    if not devices:
        if output_device is not None:
            raise MisconfigurationException(
                f"output_device={output_device!r} without device_ids has no effect. Pass both, or neither"
            )
        return [], None
    if here != devices[0]:
        raise MisconfigurationException(
            f"device_ids={device_ids!r}: the module is on {here}, but the first device is {devices[0]}. Move it there, "
            f'by module.to("{devices[0]}"), or remove device_ids'
        )
    return devices, devices[0] if output_device is None else as_device(output_device)
