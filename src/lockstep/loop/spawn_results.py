"""Transfer of results from spawned or forked processes to the calling process."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.checkpoint.first_values import fill_whole
from lockstep.cluster.world import World
from lockstep.engines.sharded.fully_shard import ENTRY, gathered
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.types import RunningStage, TrainerState
from lockstep.launch.spawn import pack
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import Hooks
from lockstep.loop.logged_metrics import LoggedMetrics
from lockstep.loop.logging import LogCollector
from lockstep.loop.progress import Progress
from lockstep.loop.session import Session

Loop = FitLoop | EvaluationLoop

# Attributes of a torch module that its state_dict contains, or that belong to one process.
_TORCH_OWN = ("_parameters", "_buffers", "_modules", "_trainer", "training")


_parents: list[Any] = []
"""In a forked process: the parent's files, threads and the like, kept alive so that they are not finalized here."""


@dataclass
class SpawnResults:
    """Results of a call on rank 0, in a form that can be sent to the calling process.

    Attributes:
        returned: the loop's return value.
        grown: layers, parameters and buffers that the call added to the module (in ``setup``, in ``configure_model``)
            or changed; None if the ranks have only parts of them.
        weights: the module's unsharded state dict, on the CPU.
        attributes: the module's other attributes.
        callbacks: the callbacks, in the Trainer's order; a callback that cannot be pickled is replaced by a dict of
            those attributes that can be pickled.
        progress: counters of the fit.
        published: the metrics that users read.
        state: last state of the Trainer.
    """

    returned: Any
    grown: dict[str, Any] | None
    weights: dict[str, Any]
    attributes: dict[str, Any]
    callbacks: list[Any]
    progress: Progress
    published: LoggedMetrics
    state: TrainerState


def call(session: Session, loop: Loop, *args: Any) -> SpawnResults:
    """Run a loop in this spawned or forked process, and collect the results for the calling process."""
    before = _build(session.module)
    returned = loop.run(*args)
    strategy = session.strategy
    predicted = isinstance(loop, EvaluationLoop) and loop.stage is RunningStage.PREDICTING
    if predicted and returned is not None and session.config.use_distributed_sampler:
        # the predictions of all ranks, in the order of the samples; ranks with the same samples send them once
        first = strategy.replicas.first_ranks
        of_ranks = strategy.collectives.gather_on_callers(returned if strategy.global_rank in first else None)
        several = isinstance(loop, EvaluationLoop) and len(loop.num_batches) > 1
        returned = in_turns([of_ranks[rank] for rank in first], several) if of_ranks else None
    module, grown = session.module, None
    if strategy.cuts_parameters:
        weights = gathered(module.state_dict(), keep=strategy.local_rank == 0)
    else:
        weights = module.cpu().state_dict()
        changed = [name for name, parts in _build(module).items() if parts != before.get(name)]
        grown = _portable({name: getattr(module, name) for name in changed})
    attributes = {name: value for name, value in vars(module).items() if not _is_torchs(name)}
    progress, published = session.fit.progress, session.published
    return SpawnResults(
        returned, grown, weights, attributes, session.base_callbacks, progress, published, session.state
    )


def _is_torchs(attribute: str) -> bool:
    # hooks and their numbered records; states of `fully_shard`
    hooks = attribute.startswith("_") and "_hooks" in attribute
    return attribute in (*_TORCH_OWN, ENTRY) or hooks or attribute.startswith("__composable_api_state")


def _build(module: nn.Module) -> dict[str, list[str]]:
    """Return {attribute of the module: lines with the names of its layers and tensors, and their class or shape}."""
    parts: dict[str, list[str]] = {}
    layers = ((name, type(layer).__qualname__) for name, layer in module.named_modules() if name)
    tensors = ((name, str(tuple(t.shape))) for name, t in chain(module.named_parameters(), module.named_buffers()))
    for name, kind in chain(layers, tensors):
        parts.setdefault(name.partition(".")[0], []).append(f"{name}: {kind}")
    return parts


def in_turns(parts: list[list[Any]], several: bool) -> list[Any]:
    """Merge the ranks' predictions in the order of the loader, whose batches were distributed round-robin.

    Args:
        parts: list of each rank, with an entry for each batch, or a list of entries for each loader.
        several: True if there are several loaders.

    Example:
        >>> in_turns([["a", "c", "e"], ["b", "d"]], several=False)
        ['a', 'b', 'c', 'd', 'e']
    """
    if several:
        return [in_turns(list(of_one), several=False) for of_one in zip(*parts, strict=True)]
    nothing = object()
    dealt = zip_longest(*parts, fillvalue=nothing)
    return [batch for batches in dealt for batch in batches if batch is not nothing]


def call_in_copy(session: Session) -> Callable[..., SpawnResults]:
    """Return the function that forked processes call instead of :func:`call`.

    The function first resets attributes of the Trainer and its parts that belong to the parent process, as pickling
    would.
    """
    if session.state.fn == "fit":  # torch's optimizers import it, which takes a second: once here, not in each copy
        import torch._dynamo  # noqa: F401
    strategy = session.strategy
    parts: tuple[Any, ...] = (strategy.checkpoint_io, session.profiler, *session.loggers, *session.base_callbacks)
    parts = (*parts, strategy, session, session.trainer)
    # only classes that define how they are pickled; since Python 3.11 `object` has `__getstate__` too
    plain = getattr(object, "__getstate__", None)
    states = [(part, part.__getstate__()) for part in parts if getattr(type(part), "__getstate__", None) is not plain]

    def call_in_fork(session: Session, loop: Loop, *args: Any) -> SpawnResults:
        for part, state in states:
            _parents.append(dict(vars(part)))  # their finalizers would close the parent's files
            getattr(part, "__setstate__", vars(part).update)(state)
        for tensor in (*session.module.parameters(), *session.module.buffers()):
            if tensor.device.type == "cpu" and tensor.is_shared():  # type: ignore[no-untyped-call]  # all ranks would step on the same numbers
                tensor.data = tensor.data.clone()
        results = call(session, loop, *args)
        # attributes that could not have been sent here need not be sent back
        results.attributes = _portable(results.attributes)
        results.callbacks = [c if _can_be_sent(c) else _portable(vars(c)) for c in results.callbacks]
        return results

    return call_in_fork


def take_over(session: Session, results: SpawnResults) -> Any:
    """Apply the results to the calling process's module, callbacks and Trainer; return the loop's return value."""
    module = session.module
    if results.grown is None and results.weights.keys() - module.state_dict().keys():
        _make_layers(session)
    for name, part in (results.grown or {}).items():
        if isinstance(part, Tensor) and not isinstance(part, Parameter):
            module.register_buffer(name, part)
        else:
            setattr(module, name, part)
    fill_whole(module)  # tensors on the meta device accept no values
    module.load_state_dict(results.weights)
    for name, value in results.attributes.items():
        object.__setattr__(module, name, value)
    # the user's own objects change, since scripts read `checkpoint.best_model_path` of the callback that they made
    for mine, theirs in zip(session.base_callbacks, results.callbacks, strict=True):
        vars(mine).update(theirs if isinstance(theirs, dict) else vars(theirs))
    session.fit.progress, session.published = results.progress, results.published
    session.state, session.has_returned = results.state, True
    return results.returned


def local_session(session: Session) -> Session:
    """Return a single-process session with the returned weights, to save checkpoints after the call."""
    # the ranks have ended, and with them the process group of the call's strategy
    strategy, io = SingleDeviceStrategy(), session.strategy.checkpoint_io
    strategy.connect(World.single(), torch.device("cpu"), session.strategy.precision)
    strategy.module, session.module.trainer = session.module, session.trainer
    strategy.checkpoint_io = None if getattr(io, "writes_shards", False) else io
    here = session.branch(strategy=strategy)
    here.results = LogCollector.of(strategy, here.module)
    here.hooks = Hooks(here.trainer, here.module, here.callbacks, here.results)
    return here


def _make_layers(session: Session) -> None:
    """Call ``configure_model`` in the calling process, so that layers for the returned weights exist."""
    module = session.module
    try:
        module.trainer = session.trainer
        module.configure_model()
        fill_whole(module)
    except Exception as error:
        raise MisconfigurationException(
            f"The run has ended and returned the weights of {type(module).__name__}, but `configure_model`, which "
            f"creates its layers, failed in this process ({error}): load a checkpoint of the run, or create the "
            "layers in `__init__`."
        ) from error


def _portable(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return those of the ``attributes`` that can be pickled."""
    return {name: value for name, value in attributes.items() if _can_be_sent(value)}


def _can_be_sent(value: object) -> bool:
    try:
        pack(value, io.BytesIO())
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError):
        return False
    return True
