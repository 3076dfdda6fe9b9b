"""`CombinedOptimizer`, which steps several optimizers as one, and support for optimizers that take a closure.

A combination is useful if, for example, one class updates matrices and another all other parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """An optimizer that combines several optimizers, each with its own parameters.

    ``step`` steps each of them, in their order. ``zero_grad``, learning rate schedulers and gradient clipping use the
    parameter groups of all. The state dict is that of one optimizer with all the groups, whatever their classes are.

    Args:
        *optimizers: the optimizers to combine; no parameter may be in two of them.

    Attributes:
        optimizers: the combined optimizers.

    Raises:
        ValueError: a parameter is in two of them, or one is LBFGS.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> matrices = [p for p in net.parameters() if p.ndim == 2]
        >>> others = [p for p in net.parameters() if p.ndim != 2]
        >>> made = CombinedOptimizer(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.001))
        >>> [group["lr"] for group in made.param_groups]
        [0.02, 0.001]
    """

    optimizers: list[Optimizer]

    def __init__(self, *optimizers: Optimizer) -> None:
        _check(optimizers)
        # as unpickling does: torch's constructor would make its own groups and state
        self.__setstate__({"defaults": {}, "optimizers": list(optimizers)})
        self.defaults.clear()  # `__setstate__` has added one, and a combined optimizer has none

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def __repr__(self) -> str:
        return f"CombinedOptimizer({', '.join(map(repr, self.optimizers))})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch's is an attribute
        """List of the parameter groups of all optimizers, in the order of the optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # torch's is an attribute
        """Mapping from each parameter to its state, over all optimizers."""
        return _States(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because it is undefined which of the optimizers should get the parameter group."""
        raise ValueError(
            "CombinedOptimizer.add_param_group cannot choose one of its optimizers for these parameters: call "
            "`add_param_group` of an optimizer in `.optimizers`"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call ``step`` of all optimizers, one after the other.

        Args:
            closure: called once, before the first step.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict, as if all parameter groups belonged to a single optimizer."""
        return merged([optimizer.state_dict() for optimizer in self.optimizers])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that :meth:`state_dict` returned.

        Args:
            state_dict: the state dict, or that of one optimizer with the same parameter groups.

        Raises:
            ValueError: the groups differ in number or length.
        """
        parts = self.split(state_dict)
        for optimizer, part in zip(self.optimizers, parts, strict=True):
            optimizer.load_state_dict(part)

    def split(self, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split a state dict from :meth:`state_dict` into one for each optimizer.

        Args:
            saved: result of :meth:`state_dict`.

        Returns:
            a list of state dicts in the order of the optimizers.

        Raises:
            ValueError: the number of groups differs.
        """
        groups = list(saved["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"loaded state dict has a different number of parameter groups: {len(groups)}, but this "
                f"CombinedOptimizer has {len(self.param_groups)}"
            )
        parts = []
        for optimizer in self.optimizers:
            mine, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            # Parameters are numbered consecutively over all optimizers, and from 0 in each one's own state dict.
            place = {number: index for index, number in enumerate(n for group in mine for n in group["params"])}
            numbered = [{**group, "params": [place[number] for number in group["params"]]} for group in mine]
            state = {place[number]: entry for number, entry in saved["state"].items() if number in place}
            parts.append({"state": state, "param_groups": numbered})
        return parts


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return a list of the optimizers inside a `CombinedOptimizer`, at any depth; ``[optimizer]`` for any other."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [part for each in optimizer.optimizers for part in parts_of(each)]


def class_of(optimizer: Optimizer) -> str:
    """Return an optimizer's class name. For a `CombinedOptimizer`, add the class names of its parts in parentheses.

    >>> class_of(CombinedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])))
    'CombinedOptimizer(SGD)'
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, CombinedOptimizer):
        return name
    return f"{name}({', '.join(map(class_of, optimizer.optimizers))})"


def by_parts(optimizer: Optimizer, state_of: Callable[[Optimizer], Mapping[str, Any]]) -> dict[str, Any]:
    """Call ``state_of`` for ``optimizer``, or for each optimizer inside a combined one, and merge the state dicts."""
    if not isinstance(optimizer, CombinedOptimizer):
        return dict(state_of(optimizer))
    return merged([by_parts(each, state_of) for each in optimizer.optimizers])


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the state dicts of several optimizers into one, with consecutive parameter numbers.

    >>> one = {"state": {0: "a"}, "param_groups": [{"params": [0]}]}
    >>> merged([one, one])
    {'state': {0: 'a', 1: 'a'}, 'param_groups': [{'params': [0]}, {'params': [1]}]}
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    start = 0
    for each in states:
        state |= {number + start: entry for number, entry in each["state"].items()}
        groups += [
            {**group, "params": [number + start for number in group["params"]]} for group in each["param_groups"]
        ]
        start += sum(len(group["params"]) for group in each["param_groups"])
    return {"state": state, "param_groups": groups}


def _check(optimizers: Sequence[Optimizer]) -> None:
    seen: set[int] = set()
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "CombinedOptimizer does not support LBFGS, which evaluates the loss several times in one step: use it "
                "alone"
            )
        mine = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for shared in mine.keys() & seen:
            raise ValueError(
                f"CombinedOptimizer: a parameter of shape {tuple(mine[shared].shape)} is in two of its optimizers: "
                "remove it from one"
            )
        seen |= mine.keys()


class _States(MutableMapping[Any, Any]):
    """Mapping from parameter to optimizer state over several optimizers. Writes go to the parameter's optimizer."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> MutableMapping[Any, Any]:
        for optimizer in self._optimizers:
            if key in optimizer.state or any(key is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def takes_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` should be called with the closure.

    An optimizer from a package other than torch and lockstep may need the closure, even if its signature is
    ``closure=None`` or ``**kwargs``.
    """
    step = inspect.unwrap(type(optimizer).step)
    # A mock of one of torch's optimizers has no module.
    package = (step.__module__ or "torch").partition(".")[0]
    return package not in ("torch", "lockstep") and ("closure" in _parameters(optimizer) or may_ignore(optimizer))


def demands_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` requires a closure, as LBFGS does."""
    closure = _parameters(optimizer).get("closure")
    return closure is not None and closure.default is closure.empty


def may_ignore(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer.step`` has ``**kwargs`` but no ``closure``, and so may ignore a closure."""
    parameters = _parameters(optimizer)
    return "closure" not in parameters and any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _parameters(optimizer: Optimizer) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(type(optimizer).step)).parameters


class EagerClosure:
    """Wrapper around a closure that evaluates it before the step, so that the optimizer may call or ignore it.

    The first call returns the loss that is already known, if weights and gradients are unchanged. Either way the
    optimizer steps with the gradients of the accumulation window.

    Args:
        closure: called in the constructor, and again by each later call.
        optimizer: the optimizer whose weights and gradients are watched.

    Attributes:
        loss: the closure's result.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: Optimizer) -> None:
        self.loss = closure()
        self._closure, self._optimizer = closure, optimizer
        self._before: list[tuple[int, ...]] | None = self._versions()

    def __call__(self) -> Any:
        is_known, self._before = self._before is not None and self._before == self._versions(), None
        if not is_known:
            self.loss = self._closure()
        return self.loss

    def _versions(self) -> list[tuple[int, ...]]:
        """Return torch's version counters of all weights and gradients. Every in-place write changes a counter."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        found = ((each._version, each.grad) for each in parameters)
        return [(version,) if grad is None else (version, id(grad), grad._version) for version, grad in found]
