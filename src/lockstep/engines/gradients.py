"""The gradients of a run, however an engine holds them. Here: whole, in ``.grad`` of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer


class HasParameters(Protocol):
    """What an engine says of the parameters that it trains."""

    @property
    def module(self) -> nn.Module:
        """Of the run."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the fit."""

    def named_parameters(self) -> dict[str, Parameter]:
        """Those of the module, and those that the optimizers alone have."""


Holder = TypeVar("Holder", covariant=True)


class Gradients(Generic[Holder]):
    """What backwards have left, for those who look at gradients between the window's last backward and its step.

    An engine that holds gradients in another way hands over a subclass as ``strategy.gradients``.

    Args:
        engine: whose gradients they are.
        holder: the object of the engine that has them, where that is not ``.grad``.
    """

    def __init__(self, engine: HasParameters, holder: Holder) -> None:
        self.engine = engine
        self.holder = holder

    def local(self, stepped: bool = False) -> list[Tensor]:
        """This rank's memory of all gradients, of what waits for a reduction, too; changed in place, they count.

        Args:
            stepped: those alone with which the optimizers step.
        """
        groups = [group["params"] for optimizer in self.engine.optimizers for group in optimizer.param_groups]
        every = groups if stepped else [*groups, self.engine.module.parameters()]
        found = {id(p): p.grad for parameters in every for p in parameters}
        return [gradient for gradient in found.values() if gradient is not None]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, ``.grad`` of each parameter is its whole gradient, also where ranks have parts of it. Collective."""
        yield

    def held(self) -> dict[str, Any]:
        """What backwards have left for steps to come, as a checkpoint takes it: ``"gradients"`` by name. Collective."""
        named = self.engine.named_parameters()
        return {"gradients": {name: p.grad.detach().cpu().clone() for name, p in named.items() if p.grad is not None}}

    def hold(self, saved: dict[str, Any]) -> None:
        """Go on with what :meth:`held` gave; or, as ``"gradients"``, with whole ones of all parameters. Collective.

        Those are the mean over the replicas, where other ranks or another engine have saved.
        """
        parameters = self.engine.named_parameters()
        for name, gradient in saved.get("gradients", {}).items():
            put(parameters[name], gradient)


def put(parameter: Parameter, gradient: Tensor) -> None:
    """Let a parameter have a gradient, on its device and in a type that it takes."""
    wanted = getattr(parameter, "grad_dtype", parameter.dtype)  # None, which torch has since 2.10: any
    parameter.grad = gradient.to(parameter.device, wanted or gradient.dtype)
