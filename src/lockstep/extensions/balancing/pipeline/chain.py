"""The chain of blocks that a pipeline splits, and steps that run in two parts: before and after the chain.

A step is a method of the user such as ``training_step``, which calls the chain once. :meth:`Chain.input_of` runs the
step up to that call. :meth:`Chain.with_output` runs the step to its end; the call returns an output that was computed
elsewhere.
Other arguments of blocks, such as masks, are computed by each rank with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.tree import tree_leaves

CONTAINERS = (nn.Sequential, nn.ModuleList)
CONTRACT = "the first argument of a block is one tensor, the output of the previous block, and it returns one tensor"
NOT_A_CHAIN = (
    "BalancedStrategy(chain={name!r}): {what}. Pass the name of an nn.Sequential or nn.ModuleList of the module with "
    "two or more blocks{known}."
)
OUTSIDE = (
    "The chain {chain!r} was called outside of a step, while its blocks are split over the ranks. Call it in "
    "`training_step`, `validation_step`, `test_step` or `predict_step`, or after the call of the Trainer."
)
BETWEEN = (
    "Block {place} of the chain {chain!r} was given a tensor other than the output of block {before}: "
    f"{CONTRACT}. Move the code between them into one of them."
)
ARGUMENTS = "Block {place} of the chain {chain!r} was called with {given}: " + CONTRACT + "."
LEARNED = (
    "Block {place} of the chain {chain!r} was called with {given}, and a tensor other than the first needs a gradient, "
    "which cannot be sent to another rank: compute the tensor inside the block, or detach it."
)
NOT_AT_FIRST = (
    "Block {place} of the chain {chain!r} was called with {given}, but the first block was called with one tensor "
    "only: call all blocks with the same arguments."
)
TWICE = (
    "The chain {chain!r} was called twice in one step: its blocks are split over the ranks, and process each "
    "micro-batch only once. Put both inputs into one batch."
)
ENDED_EARLY = (
    "A step ended after {count} of the {blocks} blocks of the chain {chain!r}: a step that calls the chain must call "
    "all blocks, in their order, for any data."
)
NOT_FIRST = "A step called block {place} of the chain {chain!r} first: start with the first block."


class _Reached(BaseException):
    """Exception that ends a user's step at the chain. As a BaseException, it passes through ``except Exception``."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class Extra:
    """Arguments of a block other than the output of the previous block."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.args or self.kwargs)


Extras = Sequence[Extra]
"""Other arguments by block; empty: each block takes one tensor only."""


class _Mode(Enum):
    REFUSES = "refuses"
    RUNS = "runs"
    TAKES = "takes"
    GIVES = "gives"


class _BlockCall:
    """Callable that replaces a block's ``forward`` or ``_call_impl`` and passes calls to the chain."""

    def __init__(self, chain: Chain, place: int, own: Callable[..., Any]) -> None:
        self.chain, self.place, self.own = chain, place, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.chain.mode is _Mode.RUNS:
            return self.own(*args, **kwargs)
        return self.chain.called(self.place, args, kwargs)


class Chain:
    """The blocks of a module that are split over ranks.

    Args:
        module: the user's.
        name: name of the container; None: the only container that is not inside another.

    Raises:
        MisconfigurationException: there is no such container, or there are several.

    Attributes:
        name: name of the container.
        blocks: the blocks, in their order.
        names: names of the blocks, as in the module's state dict.
    """

    def __init__(self, module: nn.Module, name: str | None = None) -> None:
        self.name = self._find(module) if name is None else name
        found = dict(module.named_modules()).get(self.name)
        if not isinstance(found, CONTAINERS) or len(found) < 2:
            what = "no submodule has this name" if found is None else f"this submodule is a {type(found).__name__}"
            if isinstance(found, CONTAINERS):
                what = f"it has {len(found)} block(s)"
            raise MisconfigurationException(NOT_A_CHAIN.format(name=name, what=what, known=_known(module)))
        self.blocks: list[nn.Module] = list(found)
        self.names = [f"{self.name}.{key}" for key, _ in found.named_children()]
        if len({id(block) for block in self.blocks}) < len(self.blocks) or len(self.names) < len(self.blocks):
            raise MisconfigurationException(
                f"The chain {self.name!r} contains the same block several times: create a block for each position. "
                "Blocks may share parameters."
            )
        self.mode = _Mode.REFUSES
        self._output: Tensor | None = None
        self._count = 0
        self._first: Tensor | None = None
        self._extras: list[Extra] = []
        self._takes_more = False

    def block_of(self, name: str) -> int | None:
        """Return the index of the block that contains the state dict entry ``name``; None outside the chain."""
        return next((place for place, block in enumerate(self.names) if name.startswith(f"{block}.")), None)

    @staticmethod
    def _find(module: nn.Module) -> str:
        found = _candidates(module)
        if len(found) != 1:
            what = "the module has several chains" if found else "the module has no chain of blocks"
            raise MisconfigurationException(NOT_A_CHAIN.format(name=None, what=what, known=_known(module)))
        return found[0]

    # -- calls of the blocks

    def attach(self) -> None:
        """Redirect calls of the blocks to :meth:`called`."""
        for place, block in enumerate(self.blocks):
            vars(block)["forward"] = _BlockCall(self, place, block.forward)
            # hooks run where the block computes, not where the step calls it
            vars(block)["_call_impl"] = _BlockCall(self, place, block._call_impl)

    def detach(self) -> None:
        """Restore the original calls of the blocks."""
        for block in self.blocks:
            vars(block).pop("_call_impl", None)
            patched = vars(block).pop("forward", None)
            own = getattr(patched, "own", None)
            if own is not None and getattr(own, "__func__", None) is not type(block).forward:
                vars(block)["forward"] = own  # replaced by other code before attach()

    @contextmanager
    def _in(self, mode: _Mode) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which a call of a block computes the block, as without a pipeline."""
        return self._in(_Mode.RUNS)

    def called(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Handle the user's call of one block: return a tensor in place of the block's output, or end the step."""
        if self.mode is _Mode.REFUSES:
            raise MisconfigurationException(OUTSIDE.format(chain=self.name))
        if not args or not isinstance(args[0], Tensor):
            given = _describe(args, kwargs)
            raise MisconfigurationException(ARGUMENTS.format(place=place, chain=self.name, given=given))
        value: Tensor = args[0]
        extra = Extra(args[1:], kwargs)
        if self._count == 0 and place != 0:
            raise MisconfigurationException(NOT_FIRST.format(chain=self.name, place=place))
        if place == 0 and self._count:
            raise MisconfigurationException(TWICE.format(chain=self.name))
        # each block must receive the tensor that the previous call returned, or code in between would be lost
        if place != self._count or (place and value is not self._output):
            before = self._count - 1
            raise MisconfigurationException(BETWEEN.format(place=place, chain=self.name, before=before))
        self._takes_more = bool(extra) if place == 0 else self._takes_more
        if extra and not self._takes_more:
            raise MisconfigurationException(
                NOT_AT_FIRST.format(place=place, chain=self.name, given=_describe(args, kwargs))
            )
        if self.mode is _Mode.TAKES:
            return self._collect(place, value, extra)
        self._count += 1
        assert self._output is not None
        return self._output

    def _collect(self, place: int, value: Tensor, extra: Extra) -> Tensor:
        """Record a block's arguments. Return the block's input, or end the step once all arguments are known."""
        if place == 0:
            self._first, self._extras = value, []
            # later blocks take no other arguments either: the step can end here
            if not extra:
                raise _Reached(value)
        if any(tensor.requires_grad for tensor in tree_leaves((extra.args, extra.kwargs), Tensor)):
            given = _describe((value, *extra.args), dict(extra.kwargs))
            raise MisconfigurationException(LEARNED.format(place=place, chain=self.name, given=given))
        self._extras.append(extra)
        self._count, self._output = place + 1, value
        if self._count == len(self.blocks):
            assert self._first is not None
            raise _Reached(self._first)
        return value

    # -- a step in two parts

    def input_of(self, step: Callable[[], Any]) -> tuple[Tensor | None, Extras]:
        """Run a step up to the chain. Return (chain's input or None if it is not called, blocks' other arguments)."""
        self._count, self._first, self._extras = 0, None, []
        try:
            with self._in(_Mode.TAKES):
                step()
        except _Reached as reached:
            return reached.value, self._extras
        finally:
            self._output = self._first = None
        if self._count:
            self._refuse_end()
        return None, ()

    def with_output(self, step: Callable[[], Any], output: Tensor) -> Any:
        """Run a step in which the chain returns ``output`` instead of running its blocks. Return the step's result.

        Raises:
            MisconfigurationException: the step does not call all blocks once, in their order.
        """
        self._count, self._output = 0, output
        try:
            with self._in(_Mode.GIVES):
                returned = step()
        finally:
            self._output = None
        if self._count != len(self.blocks):
            self._refuse_end()
        return returned

    def _refuse_end(self) -> None:
        raise MisconfigurationException(ENDED_EARLY.format(count=self._count, blocks=len(self.blocks), chain=self.name))


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the classes of positional and the names of keyword arguments, for messages."""
    return ", ".join([*(type(each).__name__ for each in args), *(f"{key}=" for key in kwargs)]) or "nothing"


def _candidates(module: nn.Module) -> list[str]:
    found: list[str] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and isinstance(part, CONTAINERS) and len(part) >= 2 and not inside:
            found.append(name)
    return found


def _known(module: nn.Module) -> str:
    names = _candidates(module)
    return (
        f": it has {', '.join(map(repr, names))}"
        if names
        else ". This module has none: put the layers that are to be split into one"
    )
