"""Devices that are not there: tensors of the CPU that are told apart as if they were on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.loop.hooks import Transfer

CPU = torch.device("cpu")


def made_up(number: int) -> torch.device:
    """The device of a number."""
    return torch.device("cpu", number) if number else CPU


COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class MadeUpDevices:
    """Devices "cpu:1", "cpu:2" and so on beside the CPU; inside, an operation whose tensors are on two of them raises.

    torch itself takes such tensors for ones of the CPU. Which device one is on is noted by its memory: where it was
    moved or made, and from there on with each operation, those of backwards included.

    Args:
        first: the number of the first that the Trainer takes; 0 is the CPU itself.

    Attributes:
        moves: tensors with a dimension that were moved, by the two devices.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.moves: dict[tuple[str, str], int] = {}
        self._of_memory: dict[int, torch.device] = {}
        self._held: list[Any] = []  # no memory is given back, and taken for that of another tensor

    def of(self, tensor: Tensor) -> torch.device:
        """The device of a tensor."""
        with torch._C.DisableTorchFunction():
            return self._of_memory.get(tensor.untyped_storage()._cdata, CPU)

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Say where a tensor is that has just been made."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._held.append(storage)
            self._of_memory[storage._cdata] = device

    def move(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of a tensor elsewhere, of the graph."""
        before = self.of(tensor)
        if tensor.ndim:
            kind = str(before), str(device)
            self.moves[kind] = self.moves.get(kind, 0) + 1
        moved: Tensor = _Move.apply(tensor, self, before, device)
        return moved

    @contextmanager
    def there(self) -> Iterator[None]:
        """Inside, they are there, and the Trainer takes so many as it is asked for."""

        def found(accelerator: Any, devices: Any, dealt: Any, alone: bool) -> tuple[list[torch.device], int]:
            count = devices if isinstance(devices, int) else 1
            if count == 1:  # the one process of a comparison
                return [CPU], 1
            return [made_up(number) for number in range(self.first, self.first + count)], 1 if alone else count

        own = Transfer.__init__

        def moves(transfer: Any, module: Any, *args: Any) -> None:
            own(transfer, module, *args)
            transfer.use({"transfer_batch_to_device": module.transfer_batch_to_device, **transfer.hooks})

        # on the CPU alone a batch is not moved
        transfers = patch.object(Transfer, "__init__", moves)
        with patch("lockstep.trainer.node_devices", found), transfers, _Functions(self), _Operations(self):
            yield


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, devices: MadeUpDevices, before: Any, device: Any) -> Tensor:
        ctx.devices, ctx.before = devices, before
        moved = tensor.detach().clone()
        devices.put(moved, device)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.devices.move(gradient, ctx.before), None, None, None


class _Functions(TorchFunctionMode):
    """What is asked of a tensor by Python."""

    def __init__(self, devices: MadeUpDevices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return self.devices.of(args[0])
        if func is Tensor.cpu:
            func, args = Tensor.to, (args[0], CPU)
        if func is Tensor.to:
            return self._to(args[0], [*args[1:], *kwargs.values()])
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None and isinstance(result, Tensor):
            self.devices.put(result, torch.device(kwargs["device"]))
        return result

    def _to(self, tensor: Tensor, asked: list[Any]) -> Tensor:
        for each in asked:
            if isinstance(each, (torch.device, str)) and torch.device(each) != self.devices.of(tensor):
                tensor = self.devices.move(tensor, torch.device(each))
            if isinstance(each, torch.dtype) and each is not tensor.dtype:
                with torch._C.DisableTorchFunction():
                    tensor = tensor.to(each)
        return tensor


class _Operations(TorchDispatchMode):
    """What is computed, in forwards, backwards and optimizers."""

    def __init__(self, devices: MadeUpDevices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "_foreach_" in func.name():  # of lists of tensors, each list on any devices
            return self._of_each(func, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        found = {self.devices.of(each) for each in given if each.ndim or self.devices.of(each) != CPU}
        if len(found) > 1 and func not in COPIES:
            raise _mixed(func, found)
        result = func(*args, **kwargs)
        # torch may name the device of a tensor that it casts; what is moved is seen by `_Functions`
        where = next(iter(found), kwargs.get("device") or CPU)
        known = {id(each) for each in given}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and id(each) not in known and self.devices.of(each) != where:
                self.devices.put(each, torch.device(where))
        return result

    def _of_each(self, func: Any, args: Any, kwargs: Any) -> Any:
        rows = list(zip(*(each for each in args if isinstance(each, (list, tuple))), strict=False))
        for row in rows:
            found = {self.devices.of(each) for each in row if isinstance(each, Tensor)}
            if len(found) > 1:
                raise _mixed(func, found)
        result = func(*args, **kwargs)
        for made, row in zip(result or (), rows, strict=False):
            self.devices.put(made, self.devices.of(row[0]))
        return result


def _mixed(func: Any, found: set[torch.device]) -> AssertionError:
    return AssertionError(f"{func} of tensors on {', '.join(sorted(map(str, found)))}")
