"""One process with several devices inside of DistributedDataParallel: a replica and a part of the batch on each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.ground.device import move_data_to_device
from lockstep.ground.errors import MisconfigurationException
from lockstep.parallel import dp

Device = int | str | torch.device


class OnDevices(nn.Module):
    """The part of `lockstep.parallel.ddp.DistributedDataParallel` that runs its module on this process's devices."""

    module: nn.Module
    device: torch.device
    dim: int
    _low: Any = None

    def _set_devices(self, device_ids: Sequence[Device] | str | None, output_device: Device | None) -> None:
        if isinstance(device_ids, str) and device_ids != "all":
            raise MisconfigurationException(f'device_ids={device_ids!r}: give a list of devices, "all", or None')
        if device_ids == "all":
            device_ids = list(range(torch.cuda.device_count())) or ["cpu"]
        devices = [dp.as_device(device) for device in device_ids or ()]
        if output_device is not None and not devices:
            raise MisconfigurationException(
                f"output_device={output_device!r}: outputs are moved where device_ids says on which devices to run; "
                "give those too, or leave it out"
            )
        if devices and self.device != devices[0]:
            raise MisconfigurationException(
                f"device_ids={device_ids!r}: the module is on {self.device}, and is to run on {devices[0]}: move it "
                f'there first, by module.to("{devices[0]}"), or leave device_ids out'
            )
        if len(devices) > 1 and isinstance(self.module, OnDevices):
            raise MisconfigurationException(
                f"device_ids={device_ids!r}: the module is a DistributedDataParallel already, which has no replicas: "
                "wrap the model inside of it (model.module)"
            )
        self._devices = devices
        self.device_ids = [_as_id(device) for device in devices] or None
        self.output_device: int | torch.device | None = None
        if devices:
            self.output_device = _as_id(devices[0] if output_device is None else dp.as_device(output_device))
        self.is_multi_device_module = len({p.device for p in self.module.parameters()}) > 1
        own = type(self).scatter is not OnDevices.scatter
        self._scatters = len(devices) > 1 or (own and bool(devices))

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Device]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Inputs and keyword arguments, each as one part for each device, cut along `dim`; to be overridden.

        A batch of fewer rows than devices has fewer parts. Called with several devices, and with one if overridden.
        """
        parts = dp.scatter((inputs, kwargs), [dp.as_device(device) for device in device_ids], self.dim)
        return [part for part, _ in parts], [part for _, part in parts]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        """Outputs of the replicas, each in a thread for its part; to be overridden."""
        calls = [partial(replica, *i, **k) for replica, i, k in zip(replicas, inputs, kwargs, strict=True)]
        return dp.in_threads(calls, self._devices)

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """Outputs of the parts as one, along `dim`; to be overridden."""
        return dp.gather(outputs, dp.as_device(output_device), self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs and keyword arguments moved to one device, each as the only part."""
        device = dp.as_device(device_id)
        return (move_data_to_device(inputs, device),), (move_data_to_device(kwargs, device),)

    def _run(self, inputs: Any, kwargs: Any, cast: bool = True) -> Any:
        """The module's forward on its devices."""
        if cast and self._low is not None:
            return self._low.run(partial(self._run, cast=False), inputs, kwargs)
        module = self.module
        call = module._alone if isinstance(module, OnDevices) else module
        if not self._devices:
            return call(*inputs, **kwargs)
        if not self._scatters:
            device = self._devices[0]
            return call(*move_data_to_device(inputs, device), **move_data_to_device(kwargs, device))
        ids, output_device = self.device_ids, self.output_device
        assert ids is not None
        assert output_device is not None
        parts, named = self.scatter(inputs, kwargs, ids)
        if len(self._devices) == 1:
            return self.module(*parts[0], **named[0])
        replicas = dp.replicate(self.module, self._devices[: len(parts)])
        return self.gather(self.parallel_apply(replicas, parts, named), output_device)

    def _alone(self, *inputs: Any, **kwargs: Any) -> Any:
        """The forward inside of another container's, which averages in this one's place."""
        return self._run(inputs, kwargs)


def _as_id(device: torch.device) -> int | torch.device:
    return device.index if device.type == "cuda" else device
