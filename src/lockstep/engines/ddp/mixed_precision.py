"""``mixed_precision=`` of the container: forwards in low precision over parameters that stay in full.

A forward finds casts of the parameters in their modules' tables, where layers look for them. A cast is a part of the
graph, so the gradient of a parameter comes to it in its own precision, whatever the computation was done in: buckets,
accumulation, clipping and optimizers see nothing of all this. After the forward the parameters are in their places
again. While the backward runs the casts are there once more, for what a checkpoint computes anew.

(torch's container exchanges the parameters' memory instead: outside of forward and backward it has to be changed
back, and gradients that were accumulated are rounded in each forward.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel.distributed import _MixedPrecision

from lockstep.engines.ddp.backward_watcher import find_tensors
from lockstep.engines.ddp.hooks.compress import bf16, fp16
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.tree import tree_map

MIXED = (
    "mixed_precision: layer {name!r} ({kind}) would have parameters of {parameters} and statistics of {statistics}, "
    "with which it cannot compute on the CPU: give buffer_dtype={parameters} too, or leave mixed_precision out and run "
    "the forward under torch.autocast"
)
HOOKS = {torch.float16: fp16, torch.bfloat16: bf16}
"""Gradients are sent in these, and summed in float32."""

Place = tuple[nn.Module, str, Tensor]
"""A module, a name in its table of parameters, and what is to stand there."""


class LowPrecision:
    """Runs the forwards of ``module`` as torch's ``_MixedPrecision`` says.

    Only floating point tensors are cast: parameters and inputs to ``param_dtype``, buffers, once and for all, to
    ``buffer_dtype``. Gradients travel in ``reduce_dtype`` (if None, in ``param_dtype``).

    Args:
        config: torch's.
        module: the module; nothing is done to it before `set_up`.
        ignored: names of parameters and buffers that are left alone.

    Raises:
        MisconfigurationException: for another config, a dtype that is no floating point one, one in which gradients
            cannot travel, a module in TorchScript, or a BatchNorm layer whose statistics would have another dtype.
    """

    def __init__(self, config: object, module: nn.Module, ignored: Collection[str] = ()) -> None:
        if not isinstance(config, _MixedPrecision):
            raise MisconfigurationException(
                f"mixed_precision={config!r}: give torch.nn.parallel.distributed._MixedPrecision(param_dtype=...), or "
                "leave it out and run the forward under torch.autocast"
            )
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(config, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise MisconfigurationException(
                    f"mixed_precision: {name}={dtype!r}: give a floating point dtype, or None to cast nothing"
                )
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise MisconfigurationException(
                "mixed_precision: the module is in TorchScript, whose parameters cannot be exchanged for a forward: "
                "run the forward under torch.autocast"
            )
        self._config = config
        self._module = module
        self._ignored = frozenset(ignored)
        self._travels = self._check_travel()
        self._check_statistics()

    def _check_travel(self) -> torch.dtype | None:
        """The dtype of `HOOKS` in which gradients travel; None for that of the parameters."""
        wanted = self._config.reduce_dtype or self._config.param_dtype
        kinds = {parameter.dtype for _, _, parameter in self._places() if parameter.requires_grad}
        if wanted is None or kinds <= {wanted}:
            return None
        if wanted not in HOOKS:
            raise MisconfigurationException(
                f"mixed_precision: gradients of {', '.join(sorted(map(str, kinds)))} parameters cannot be sent as "
                f"{wanted}: let reduce_dtype be torch.float16, torch.bfloat16, or the parameters' own dtype"
            )
        return wanted

    def _check_statistics(self) -> None:
        low, buffers = self._config.param_dtype, self._config.buffer_dtype
        cast = {id(parameter) for _, _, parameter in self._places()}
        for name, part in self._module.named_modules():
            if not isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                continue
            weight, mean = part.weight, part.running_mean
            if low is None or mean is None or id(weight) not in cast or weight.device.type != "cpu":
                continue
            statistics = mean.dtype if f"{name}.running_mean".lstrip(".") in self._ignored else buffers or mean.dtype
            if statistics is not low:
                kind = type(part).__name__
                raise MisconfigurationException(
                    MIXED.format(name=name, kind=kind, parameters=low, statistics=statistics)
                )

    def set_up(self) -> None:
        """Cast the buffers, and say so with each parameter, by torch's names."""
        dtype = self._config.buffer_dtype
        for name, buffer in self._module.named_buffers():
            if dtype is not None and name not in self._ignored and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)
        self.tell()

    def tell(self) -> None:
        """Leave with each parameter what torch's container leaves there: ``_fp_param``, its values in full precision,
        and ``_mp_param``, which has the dtype of its casts, and no memory outside of a forward."""
        for _, _, parameter in self._places():
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            low = torch.empty_like(parameter, dtype=self._config.param_dtype, device="meta", requires_grad=False)
            parameter._mp_param = low  # type: ignore[attr-defined]

    def comm_hook(self, group: comm.Group) -> tuple[Any, ...] | None:
        """The communication hook, and its state, that sends gradients in low precision; None where none is needed."""
        if self._travels is None or comm.world_size(group) == 1:
            return None
        return None if group is torch.distributed.group.WORLD else group, HOOKS[self._travels], None

    def run(self, forward: Callable[[Any, Any], Any], inputs: Any, kwargs: Any) -> Any:
        """``forward(inputs, kwargs)`` in low precision.

        Its outputs stay in low precision, as with torch's.
        """
        if self._config.param_dtype is None:
            return forward(inputs, kwargs)
        inputs, kwargs = tree_map(self._cast, (inputs, kwargs), Tensor)
        casts = self._make_casts()
        before = _put(casts)
        try:
            outputs = forward(inputs, kwargs)
        finally:
            _put(before)
        if torch.is_grad_enabled():
            self._await_backward(outputs, casts)
        return outputs

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._config.param_dtype) if tensor.is_floating_point() else tensor

    def _places(self) -> list[Place]:
        """Where floating point parameters stand now; shared ones stand at several places."""
        return [
            (part, name, parameter)
            for prefix, part in self._module.named_modules()
            for name, parameter in part._parameters.items()
            if parameter is not None
            and parameter.is_floating_point()
            and not (self._ignored and f"{prefix}.{name}".lstrip(".") in self._ignored)
        ]

    def _make_casts(self) -> list[Place]:
        """A cast of each parameter that has another dtype."""
        low = self._config.param_dtype
        casts: dict[int, Tensor] = {}
        places = [place for place in self._places() if place[2].dtype is not low]
        for _, _, parameter in places:
            if id(parameter) not in casts:
                casts[id(parameter)] = parameter.to(low)
        return [(part, name, casts[id(parameter)]) for part, name, parameter in places]

    def _await_backward(self, outputs: object, casts: list[Place]) -> None:
        """Have ``casts`` in their places while a backward from ``outputs`` runs."""
        if not casts:
            return
        part, name, cast = casts[0]
        low = cast.dtype
        del cast

        def reached(grad: Tensor) -> None:
            if part._parameters[name].dtype is not low:  # type: ignore[union-attr]
                if not casts:  # a second backward
                    with torch.enable_grad():
                        casts.extend(self._make_casts())
                Variable._execution_engine.queue_callback(_InPlace(casts).end)
            casts.clear()  # a graph that is kept longer need not hold them

        for output in find_tensors(outputs):
            if output.requires_grad and not output.is_leaf:
                output.register_hook(reached)


class _InPlace:
    """Casts in the parameters' places, until a backward has ended or has failed.

    Autograd keeps it with its callbacks, and drops it when the backward is over, whether or not it came to them.
    """

    def __init__(self, casts: Sequence[Place]) -> None:
        self._before = _put(casts)

    def end(self) -> None:
        _put(self._before)
        self._before = []

    def __del__(self) -> None:
        self.end()


def _put(places: Sequence[Place]) -> list[Place]:
    """Let tensors stand where they are to; gives what stood there before."""
    before = []
    for part, name, tensor in places:
        table: dict[str, Any] = part._parameters
        before.append((part, name, table[name]))
        table[name] = tensor
    return before
