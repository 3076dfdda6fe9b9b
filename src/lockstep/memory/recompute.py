"""Recomputation: the activations of some layers are not kept for the backward, which computes them again.

    recompute(model)                      # its repeated blocks
    recompute(model, {Block})             # layers of a class
    recompute(model, save="matmuls")      # of those blocks all but the outputs of matrix products

The mechanism is ``torch.utils.checkpoint`` without re-entrance. A second forward counts nothing twice: while it runs,
buffers have the values of the first one, and they are put back (BatchNorm's statistics); nothing is logged; numbers
without a dtype get that of the first forward; a cache of keys and values gets nothing. Names of parameters and keys of
a state dict stay as they are.
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

from lockstep.engines.sharded.fully_shard import Policy as Policy
from lockstep.engines.sharded.fully_shard import blocks_by, find_blocks
from lockstep.ground.rank import warn_once

Layers: TypeAlias = Literal[True] | type[nn.Module] | Policy
"""The repeated blocks of a model, layers of one class or several, or a policy function of torch's first FSDP."""

Save: TypeAlias = Literal["matmuls"] | Sequence[Any] | Callable[..., Any] | None
"""What is kept of the layers all the same: operators of torch, or a policy function ``(ctx, op, *args, **kwargs)``."""

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

NO_BLOCKS = (
    "activation_checkpointing=True: {name} has no repeated blocks (layers side by side, of one class, made of layers), "
    "so that nothing is recomputed: name the layers by their classes, activation_checkpointing={{Block}}."
)


SMALL = 2**16
"""Elements of a buffer that counts as changed in any case: torch's batch norm does not count its changes."""


class _State(threading.local):
    recomputing = False
    kept: Callable[[object], None] | None = None  # is shown what is kept of recomputed layers, by who counts it


STATE = _State()
"""Whether this thread computes activations again; a thread of its own runs the backward of a GPU."""


def is_recomputing() -> bool:
    """Whether a backward computes a layer's activations again: for code in a ``forward`` that counts its calls."""
    return STATE.recomputing


@contextmanager
def running_again() -> Iterator[None]:
    """Inside, code runs that runs once more and counts then: nothing is logged."""
    before, STATE.recomputing = STATE.recomputing, True
    try:
        yield
    finally:
        STATE.recomputing = before


def matmuls() -> list[Any]:
    """The operators whose outputs take longest to compute: matrix products, convolutions and attention."""
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
    """Let activations of some layers of ``module`` be computed again in the backward; works in any loop.

    Gradients are bitwise those without it, dropout included. It costs another forward of these layers.

    Args:
        module: is changed in place: the layers' ``forward``.
        layers: which; they may lie inside of each other.
        save: what is kept all the same: "matmuls", a list of operators (``torch.ops.aten.mm.default``), or a policy
            function as of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Returns:
        what makes the layers keep their activations again.

    Raises:
        ValueError: no layer is chosen, or ``save`` is none of these.

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
    changed = [layer for layer in chosen if not isinstance(vars(layer).get("forward"), Again)]
    for layer in changed:
        vars(layer)["forward"] = Again(layer, contexts)

    def end() -> None:
        for layer in changed:
            again = vars(layer).pop("forward", None)
            if isinstance(again, Again) and again.own is not None:
                vars(layer)["forward"] = again.own

    return end


def _saving(save: Save) -> Contexts | None:
    """What makes the two contexts of a forward of which some outputs are kept."""
    if save is None:
        return None
    if isinstance(save, str):
        if save != "matmuls":
            raise ValueError(f'activation_checkpointing_save={save!r}: the one name is "matmuls"')
        save = matmuls()
    try:
        chosen = save if callable(save) else list(save)
        create_selective_checkpoint_contexts(chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"activation_checkpointing_save={save!r:.100}: {error}") from None
    return partial(create_selective_checkpoint_contexts, chosen)


class Again:
    """Stands in the place of a layer's ``forward``, an attribute of the layer, so that it is copied with it.

    Attributes:
        layer: whose forward it is.
        contexts: what makes the contexts in which some outputs are kept.
        own: a ``forward`` that the layer had been given before, beside that of its class.
    """

    def __init__(self, layer: nn.Module, contexts: Contexts | None = None) -> None:
        self.layer, self.contexts = layer, contexts
        self.own: Callable[..., Any] | None = vars(layer).get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return computed_again(self._forward(), self.layer, self.contexts, args, kwargs)

    def of(self, layer: nn.Module) -> Again:
        """The same for a replica of the layer."""
        made = Again.__new__(Again)
        made.layer, made.contexts, made.own = layer, self.contexts, self.own
        return made

    def _forward(self) -> Callable[..., Any]:
        return self.own or partial(type(self.layer).forward, self.layer)


def computed_again(
    forward: Callable[..., Any],
    layer: nn.Module,
    contexts: Contexts | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    **options: Any,
) -> Any:
    """Call ``forward`` so that a backward calls it again in place of what it would have kept.

    Args:
        forward: of the layer.
        layer: whose buffers may change.
        contexts: what makes the contexts of the two calls; None: nothing is kept.
        args, kwargs: of ``forward``.
        **options: further ones of ``torch.utils.checkpoint.checkpoint``.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if any(_is_cache(each) for each in (*args, *kwargs.values())):
        args, kwargs = _without_caches(args, kwargs)
    names, count = tuple(kwargs), len(args)

    def call(*flat: Any) -> Any:  # torch looks for devices and random states among the positional arguments
        flat = tuple(each.copy() if type(each) is _FilledCache else each for each in flat)
        return forward(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

    if torch.compiler.is_compiling():  # the compiler does all this by itself
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False)
    buffers, dtype = _Buffers(layer), torch.get_default_dtype()

    kept: list[object] = []

    def both() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if contexts is None:
            return nullcontext(), _SecondTime(buffers, dtype, nullcontext())
        first, second = (_Uncached(each) for each in contexts())
        kept.append(getattr(first.inner, "storage", None))
        return first, _SecondTime(buffers, dtype, second)

    try:
        return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, context_fn=both, **options)
    finally:
        buffers.forget_unchanged()
        if STATE.kept is not None:
            STATE.kept(kept)


# -- caches of keys and values -------------------------------------------------------------------------------


def _is_cache(value: object) -> bool:
    """Return True for a cache of transformers', to which each call of a layer appends its keys and values."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put empty caches aside, as transformers does where it recomputes: nothing of the layer would be freed else.

    A cache that has something in it (a prefix that is trained, earlier text) stays: each call gets a copy of it.
    """
    args = tuple(_aside(each) if _is_cache(each) else each for each in args)
    kwargs = {name: _aside(each) if _is_cache(each) else each for name, each in kwargs.items()}
    if kwargs.get("use_cache") and not any(type(each) is _FilledCache for each in (*args, *kwargs.values())):
        kwargs["use_cache"] = False
    return args, kwargs


def _aside(cache: Any) -> _FilledCache | None:
    tensors: list[Tensor] = []
    _copied(cache, tensors)
    return _FilledCache(cache) if any(each.numel() for each in tensors) else None


class _FilledCache:
    """Stands for a cache that a layer reads, as it was before the first call.

    The caller's own cache gets what the first call appends.
    """

    def __init__(self, cache: Any) -> None:
        self._before, self._own = _copied(cache, []), cache

    def copy(self) -> Any:
        """Return the caller's cache at the first call, and a copy of what was in it at each further one."""
        own, self._own = self._own, None
        return _copied(self._before, []) if own is None else own


def _copied(value: Any, tensors: list[Tensor]) -> Any:
    """Copy a cache and the lists, dicts and layers in it, but not their tensors, which are collected."""
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
    """A context without autocast's cache: operators are told apart by how many came before, and it leaves some out."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.set_autocast_cache_enabled(self._before)
        self.inner.__exit__(*exception)


class _SecondTime:
    """Around a forward that is computed again; a graph of which several backwards are taken enters it several times."""

    def __init__(self, buffers: _Buffers, dtype: torch.dtype, inner: AbstractContextManager[Any]) -> None:
        self._buffers, self._dtype, self._inner = buffers, dtype, inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._outer, self._default = STATE.recomputing, torch.get_default_dtype()
        STATE.recomputing = True
        torch.set_default_dtype(self._dtype)
        self._stack.enter_context(self._buffers.as_before())
        self._stack.enter_context(self._inner)

    def __exit__(self, *exception: Any) -> None:
        STATE.recomputing = self._outer
        torch.set_default_dtype(self._default)
        self._stack.__exit__(*exception)


class _Buffers:
    """The buffers that a layer's forward changes, as they were before: a second forward has to see those values."""

    def __init__(self, layer: nn.Module) -> None:
        self._kept = [
            (part._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for part in layer.modules()
            if part._buffers
            for name, buffer in part._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def forget_unchanged(self) -> None:
        """The first forward has ended: drop the copies of what it left alone, but for small ones."""
        self._kept = [
            (buffers, name, buffer, version, value)
            for buffers, name, buffer, version, value in self._kept
            if buffers.get(name) is not buffer or buffer._version != version or buffer.numel() <= SMALL
        ]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the layer has the values of the time before; what is done to them is dropped."""
        copies: dict[int, Tensor] = {}
        after = [(buffers, name, buffers.get(name)) for buffers, name, *_ in self._kept]
        for buffers, name, own, _, value in self._kept:
            buffers[name] = copies.setdefault(id(own), value.clone())
        try:
            yield
        finally:
            for buffers, name, buffer in after:
                buffers[name] = buffer


# -- torch's own wrapper -------------------------------------------------------------------------------------


class _InWrapper:
    """In the place of a ``CheckpointWrapper``'s function, which calls torch's checkpoint by itself."""

    def __init__(self, own: partial[Any]) -> None:
        self.own = own

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in self.own.keywords.items() if name != "use_reentrant"}
        contexts = options.pop("context_fn", None)
        return computed_again(layer, layer, contexts, args, kwargs, **options)


def adopt_wrappers(module: nn.Module) -> Callable[[], None]:
    """Let layers in torch's ``CheckpointWrapper`` be recomputed as ours are, without counting anything twice.

    Re-entrant ones, and those with a function of the user's, stay as they are.

    Returns:
        what makes the wrappers as they were.
    """
    torchs = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if torchs is None:  # the user has none
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


# -- as a strategy takes it ----------------------------------------------------------------------------------


class Recomputation:
    """The arguments of a strategy, and what they have changed in a module.

    Args:
        strategy: the class's name, for errors.
        layers: ``activation_checkpointing``: True, a class or several.
        policy: ``activation_checkpointing_policy``: classes or a policy function.
        save: ``activation_checkpointing_save``.

    Raises:
        ValueError: for arguments that do not go together.
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
                "both say which layers are recomputed: give one of them"
            )
        if save is not None and self._layers is None:
            raise ValueError(
                f"{strategy}(activation_checkpointing_save={save!r:.100}): it says what is kept of recomputed layers: "
                "say which those are, by activation_checkpointing=True or classes"
            )
        if not (self._layers is None or self._layers is True or callable(self._layers) or _are_classes(self._layers)):
            raise ValueError(
                f"{strategy}({self._argument}={self._layers!r:.100}): give True, classes of layers, or by "
                "activation_checkpointing_policy a function"
            )
        try:
            _saving(save)
        except ValueError as error:
            raise ValueError(f"{strategy}({error})") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ends": []}  # a copy has changed nothing

    @property
    def is_on(self) -> bool:
        """Whether layers are recomputed by these arguments."""
        return self._layers is not None

    def begin(self, module: nn.Module) -> None:
        """Change the module's layers, those in torch's wrappers, too."""
        self.end()
        self._ends.append(adopt_wrappers(module))
        if self._layers is not None:
            try:
                self._ends.append(recompute(module, self._layers, self._save))
            except ValueError as error:
                value = f"{self._argument}={self._layers!r:.100}"
                raise ValueError(f"{self._strategy}({value}): {error}") from None

    def end(self) -> None:
        """Make the layers what they were."""
        while self._ends:
            self._ends.pop()()


def _are_classes(given: object) -> bool:
    each = [given] if isinstance(given, type) else list(given) if isinstance(given, Collection) else [given]
    return all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in each)
