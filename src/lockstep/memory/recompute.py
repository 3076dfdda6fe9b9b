"""Activation checkpointing: the backward recomputes activations of some layers instead of storing them.

    recompute(model)                      # its repeated blocks
    recompute(model, {Block})             # layers of a class
    recompute(model, save="matmuls")      # in those blocks, keep the outputs of matrix products

The mechanism is ``torch.utils.checkpoint`` without re-entrance. The second forward has no side effects. It reads
buffers with their values from the first forward, and its changes to buffers are dropped (BatchNorm's statistics). It
logs nothing, uses the first forward's default dtype, and appends nothing to a cache of keys and values. Names of
parameters and keys of a state dict do not change.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lockstep.ground.rank import warn_once
from lockstep.memory.blocks import Policy as Policy
from lockstep.memory.blocks import blocks_by, find_blocks

Layers: TypeAlias = Literal[True] | type[nn.Module] | Policy
"""A model's repeated blocks (True), layers of one or several classes, or a policy function of torch's first FSDP."""

Save: TypeAlias = Literal["matmuls"] | Sequence[Any] | Callable[..., Any] | None
"""Operators whose outputs are stored instead of recomputed, or a policy ``(ctx, op, *args, **kwargs)``."""

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

NO_BLOCKS = (
    "activation_checkpointing=True has no effect: {name} has no repeated blocks (sibling layers of the same class that "
    "contain layers). Pass the classes of the layers to recompute, activation_checkpointing={{Block}}."
)


SMALL = 2**16
"""Number of elements up to which a buffer counts as changed, since batch norm does not raise its version."""


class _State(threading.local):
    recomputing = False
    count: Callable[[object], None] | None = None  # gets the tensors that recomputed layers keep, to count them


STATE = _State()
"""State of this thread, such as whether it recomputes activations. Each GPU's backward has a separate thread."""


def is_recomputing() -> bool:
    """Return True while a backward recomputes a layer. Use this in a ``forward`` that counts its calls."""
    return STATE.recomputing


@contextmanager
def running_again() -> Iterator[None]:
    """Disable logging inside the block, because another run of the same code logs the same values."""
    before, STATE.recomputing = STATE.recomputing, True
    try:
        yield
    finally:
        STATE.recomputing = before


def matmuls() -> list[Any]:
    """Return the most expensive operators: matrix products, convolutions and attention."""
    aten = torch.ops.aten
    packets = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
    attention = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    found = [packet.default for packet in packets]
    return found + [getattr(aten, name).default for name in attention if hasattr(aten, name)]


def recompute(module: nn.Module, layers: Layers = True, save: Save = None) -> Callable[[], None]:
    """Recompute activations of some layers in the backward instead of storing them, in any loop.

    Gradients have the same bits as without recomputation, also with dropout. The cost is a second forward of these
    layers.

    Args:
        module: the module; the layers' ``forward`` is replaced.
        layers: the layers, which may contain each other.
        save: operators whose outputs are stored: "matmuls", a list (``torch.ops.aten.mm.default``), or a policy
            function of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Returns:
        A function that restores the layers.

    Raises:
        ValueError: ``layers`` selects no layer, or ``save`` is invalid.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        >>> end = recompute(net, {nn.Linear})
        >>> net(torch.ones(1, 4)).sum().backward()
        >>> list(net.state_dict())
        ['0.weight', '0.bias']
    """
    contexts = _saving(save)
    if layers is True:
        chosen = find_blocks(module)
        if not chosen:
            warn_once(NO_BLOCKS.format(name=type(module).__name__))
    else:
        chosen = blocks_by({layers} if isinstance(layers, type) else layers, module, alone=False)
    # a layer that is recomputed already would run a third time
    changed = [layer for layer in chosen if not isinstance(vars(layer).get("forward"), Recomputed)]
    for layer in changed:
        vars(layer)["forward"] = Recomputed(layer, contexts)

    def end() -> None:
        for layer in changed:
            again = vars(layer).pop("forward", None)
            if isinstance(again, Recomputed) and again.own is not None:
                vars(layer)["forward"] = again.own

    return end


def _saving(save: Save) -> Contexts | None:
    """Return a function that creates torch's selective checkpoint contexts for ``save``. Return None for None."""
    if save is None:
        return None
    if isinstance(save, str):
        if save != "matmuls":
            raise ValueError(f'activation_checkpointing_save={save!r} is not known; the only name is "matmuls"')
        save = matmuls()
    # checked now: torch would refuse it only in the first forward
    try:
        chosen = save if callable(save) else list(save)
        create_selective_checkpoint_contexts(chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"activation_checkpointing_save={save!r:.100}: {error}") from None
    return partial(create_selective_checkpoint_contexts, chosen)


class Recomputed:
    """Replacement for a layer's ``forward``. The backward then recomputes the layer's activations.

    Attributes:
        layer: the layer.
        contexts: creates the contexts in which some outputs are stored; None: no outputs are stored.
        own: a ``forward`` that was in the layer's attributes before.
    """

    def __init__(self, layer: nn.Module, contexts: Contexts | None = None) -> None:
        self.layer, self.contexts = layer, contexts
        self.own: Callable[..., Any] | None = vars(layer).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_recomputed(self._forward(), self.layer, self.contexts, args, kwargs)

    def of(self, layer: nn.Module) -> Recomputed:
        """Return a copy of this replacement for ``layer``, a replica of the original layer."""
        made = Recomputed.__new__(Recomputed)
        made.layer, made.contexts, made.own = layer, self.contexts, self.own
        return made

    def _forward(self) -> Callable[..., Any]:
        return self.own or partial(type(self.layer).forward, self.layer)


def call_recomputed(
    forward: Callable[..., Any],
    layer: nn.Module,
    contexts: Contexts | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    **options: Any,
) -> Any:
    """Call ``forward`` without storing its activations. The backward calls ``forward`` again to recompute them.

    Args:
        forward: the layer's function.
        layer: the layer, whose buffers may change.
        contexts: creates the contexts of both calls; None: no outputs are stored.
        args, kwargs: arguments of ``forward``.
        **options: further arguments of ``torch.utils.checkpoint.checkpoint``.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if any(_is_cache(each) for each in (*args, *kwargs.values())):
        # Leave empty caches out, as transformers does when it recomputes: they would keep all keys and values. A cache
        # with content (a trained prefix, earlier text) stays: each call gets a copy of it.
        args = tuple(_filled_or_none(each) if _is_cache(each) else each for each in args)
        kwargs = {name: _filled_or_none(each) if _is_cache(each) else each for name, each in kwargs.items()}
        if kwargs.get("use_cache") and not any(type(each) is _FilledCache for each in (*args, *kwargs.values())):
            kwargs["use_cache"] = False
    names, count = tuple(kwargs), len(args)

    def call(*flat: Any) -> Any:  # torch looks for devices and random states among the positional arguments
        flat = tuple(each.copy() if type(each) is _FilledCache else each for each in flat)
        return forward(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

    if torch.compiler.is_compiling():  # the compiler handles buffers and dtypes itself
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False)
    buffers, dtype = _Buffers(layer), torch.get_default_dtype()

    kept: list[object] = []

    def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if contexts is None:
            return nullcontext(), _SecondForward(buffers, dtype, nullcontext())
        first, second = (_Uncached(each) for each in contexts())
        kept.append(getattr(first.inner, "storage", None))
        return first, _SecondForward(buffers, dtype, second)

    try:
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=both, **options)
    finally:
        buffers.forget_unchanged()
        if STATE.count is not None:
            STATE.count(kept)


# -- caches of keys and values -------------------------------------------------------------------------------


def _is_cache(value: object) -> bool:
    """Return True for a key-value cache of transformers, to which each call of a layer appends."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _filled_or_none(cache: Any) -> _FilledCache | None:
    tensors: list[Tensor] = []
    _copied(cache, tensors)
    return _FilledCache(cache) if any(each.numel() for each in tensors) else None


class _FilledCache:
    """Placeholder argument for a key-value cache, with the cache's content before the first call.

    The first call appends to the caller's own cache.
    """

    def __init__(self, cache: Any) -> None:
        self._before, self._own = _copied(cache, []), cache

    def copy(self) -> Any:
        """Return the caller's cache at the first call, and a copy of its original content at each further call."""
        own, self._own = self._own, None
        return _copied(self._before, []) if own is None else own


def _copied(value: Any, tensors: list[Tensor]) -> Any:
    """Copy a cache with its lists, dicts and layers. Append the tensors to ``tensors`` instead of copying them."""
    if isinstance(value, Tensor):
        tensors.append(value)
    if isinstance(value, list):
        return [_copied(each, tensors) for each in value]
    if isinstance(value, dict):
        return {name: _copied(each, tensors) for name, each in value.items()}
    if not type(value).__module__.startswith("transformers.cache_utils"):
        return value
    made = copy(value)
    vars(made).update({name: _copied(each, tensors) for name, each in vars(value).items()})
    return made


# -- the second call -----------------------------------------------------------------------------------------


class _Uncached:
    """Context that disables autocast's cache, since both forwards must run the same operators in the same order."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.set_autocast_cache_enabled(self._before)
        self.inner.__exit__(*exception)


class _SecondForward:
    """Context for the second forward, entered once by each backward through the graph."""

    def __init__(self, buffers: _Buffers, dtype: torch.dtype, inner: AbstractContextManager[Any]) -> None:
        self._buffers, self._dtype, self._inner = buffers, dtype, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._outer, self._default = STATE.recomputing, torch.get_default_dtype()
        STATE.recomputing = True
        torch.set_default_dtype(self._dtype)
        self._stack.enter_context(self._buffers.original_values())
        self._stack.enter_context(self._inner)

    def __exit__(self, *exception: Any) -> None:
        STATE.recomputing = self._outer
        torch.set_default_dtype(self._default)
        self._stack.__exit__(*exception)


class _Buffers:
    """Copies of the buffers that a layer's forward changes, since the second forward must read the original values."""

    def __init__(self, layer: nn.Module) -> None:
        self._kept = [
            (part._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for part in layer.modules()
            if part._buffers
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def forget_unchanged(self) -> None:
        """Drop the copies of large buffers that the first forward has not changed."""
        self._kept = [
            (buffers, name, buffer, version, value)
            for buffers, name, buffer, version, value in self._kept
            if buffers.get(name) is not buffer or buffer._version != version or buffer.numel() <= SMALL
        ]

    @contextmanager
    def original_values(self) -> Iterator[None]:
        """Use the original values as the layer's buffers inside the block, and drop changes to them."""
        copies: dict[int, Tensor] = {}
        after = [(buffers, name, buffers.get(name)) for buffers, name, *_ in self._kept]
        # other tensors instead of other values: the first forward may have saved the buffers for its backward
        for buffers, name, own, _, value in self._kept:
            buffers[name] = copies.setdefault(id(own), value.clone())
        try:
            yield
        finally:
            for buffers, name, buffer in after:
                buffers[name] = buffer


# -- torch's own wrapper -------------------------------------------------------------------------------------


class _InWrapper:
    """Replacement for the ``checkpoint_fn`` of a ``CheckpointWrapper``. It recomputes as `recompute` does."""

    def __init__(self, own: partial[Any]) -> None:
        self.own = own

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in self.own.keywords.items() if name != "use_reentrant"}
        contexts = options.pop("context_fn", None)
        return call_recomputed(layer, layer, contexts, args, kwargs, **options)


def adopt_wrappers(module: nn.Module) -> Callable[[], None]:
    """Make torch's ``CheckpointWrapper`` recompute as `recompute` does: the second forward has no side effects.

    Re-entrant wrappers, and wrappers with a user's checkpoint function, are not changed.

    Returns:
        A function that restores the wrappers.
    """
    torchs = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if torchs is None:  # not imported: the module has no wrappers
        return lambda: None
    changed = []
    for layer in module.modules():
        own = getattr(layer, "checkpoint_fn", None) if isinstance(layer, torchs.CheckpointWrapper) else None
        if isinstance(own, partial) and own.func is checkpoint and own.keywords.get("use_reentrant") is False:
            vars(layer)["checkpoint_fn"] = _InWrapper(own)
            changed.append((layer, own))

    def end() -> None:
        for layer, own in changed:
            vars(layer)["checkpoint_fn"] = own

    return end


# -- the arguments of strategies -----------------------------------------------------------------------------


class Recomputation:
    """Activation checkpointing by a strategy's arguments: replaces the selected layers' forwards, and restores them.

    Args:
        strategy: name of the strategy class, for error messages.
        layers: ``activation_checkpointing``: True, a class or several.
        policy: ``activation_checkpointing_policy``: classes or a policy function.
        save: ``activation_checkpointing_save``.

    Raises:
        ValueError: an argument is invalid, or two contradict each other.
    """

    def __init__(
        self,
        strategy: str,
        layers: Layers | Literal[False] | None = None,
        policy: Policy | None = None,
        save: Save = None,
    ) -> None:
        self._strategy, self._save = strategy, save
        self._layers: Layers | None = policy if policy is not None else (layers or None)
        self._argument = "activation_checkpointing" if policy is None else "activation_checkpointing_policy"
        self._ends: list[Callable[[], None]] = []
        if policy is not None and layers:
            raise ValueError(
                f"{strategy}(activation_checkpointing={layers!r:.80}, activation_checkpointing_policy={policy!r:.80}): "
                "both select the layers to recompute, so use only one of them"
            )
        if save is not None and self._layers is None:
            raise ValueError(
                f"{strategy}(activation_checkpointing_save={save!r:.100}) has no effect, because no layers are "
                "selected. Select them with activation_checkpointing=True or classes"
            )
        chosen: Any = self._layers
        kinds = list(chosen) if isinstance(chosen, Collection) else [chosen]
        are_classes = all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
        if not (chosen is None or chosen is True or callable(chosen) or are_classes):
            raise ValueError(
                f"{strategy}({self._argument}={self._layers!r:.100}) must be True or classes of layers, or a function "
                "as activation_checkpointing_policy"
            )
        try:
            _saving(save)
        except ValueError as error:
            raise ValueError(f"{strategy}({error})") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ends": []}  # a copy has changed no module

    @property
    def is_on(self) -> bool:
        """True if the arguments select layers."""
        return self._layers is not None

    def begin(self, module: nn.Module) -> None:
        """Replace the forwards of the selected layers, and of layers in torch's ``CheckpointWrapper``."""
        self.end()
        self._ends.append(adopt_wrappers(module))
        if self._layers is not None:
            try:
                self._ends.append(recompute(module, self._layers, self._save))
            except ValueError as error:
                value = f"{self._argument}={self._layers!r:.100}"
                raise ValueError(f"{self._strategy}({value}): {error}") from None

    def end(self) -> None:
        """Restore the layers' original forwards."""
        while self._ends:
            self._ends.pop()()
