"""Errors of torch that end a call and whose own words lead users astray, in other words."""

from __future__ import annotations

from lockstep.checkpoint.pretrained import is_of_transformers
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed, words_of
from lockstep.ground.memory_use import is_oom_error
from lockstep.module import LightningModule

OWN = (MisconfigurationException, CorruptCheckpoint, RankFailed, KeyboardInterrupt)
"""Errors that need no other words."""

OUT_OF_MEMORY = "(trainer.memory() shows what memory is used for, and docs/memory.md what needs less.)"


def in_words(module: LightningModule | None, error: BaseException) -> None:
    """Give an error of torch that misleads another message, in place: it is still the one of the user's line."""
    if isinstance(error, OWN) or len(error.args) > 1:
        return
    text, said = words_of(error), None
    if is_oom_error(error):
        said = text if OUT_OF_MEMORY in text else f"{text} {OUT_OF_MEMORY}".lstrip()
    elif module is not None and isinstance(error, RuntimeError):
        said = _reworded(module, text)
    if said is not None:
        error.args = (said,)


def _reworded(module: LightningModule, text: str) -> str | None:
    """Return another message for one of torch's; None for all others."""
    if "backward through the graph a second time" in text and module.automatic_optimization:
        # torch advises retain_graph=True, with which gradients would be added twice
        return (
            f"{type(module).__name__}.training_step: its loss leads to a graph that a backward has already gone "
            "through. Either it has called `backward` itself: return the loss, and the Trainer does; or it keeps a "
            "tensor of an earlier step: keep `tensor.detach()`."
        )
    return _on_meta(module) if "meta" in text else None


def _on_meta(module: LightningModule) -> str | None:
    names = [repr(name) for name, parameter in module.named_parameters() if parameter.is_meta]
    if not names:
        return None
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if any(map(is_of_transformers, module.modules())):
        return (
            f"{type(module).__name__}: parameter {which} is on the meta device, and has no values until those of the "
            "folder that `load_pretrained` names are read, after `configure_model`: what computes with values comes "
            "too early there, as resize_token_embeddings does (it takes a mean). For a larger vocabulary write another "
            "folder, once, and load that: from_pretrained, resize_token_embeddings, save_pretrained(NEW_FOLDER)."
        )
    return (
        f"{type(module).__name__}: parameter {which} is on the meta device, and has no values: make the layer in "
        "`configure_model`, or call `to_empty(device=...)` and initialize it, before the fit."
    )
