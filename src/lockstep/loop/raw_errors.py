"""Raw errors of torch, Python and DeepSpeed that end a call, in the user's words: the name, the cause, the way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from math import prod

import torch
from torch import nn

from lockstep.checkpoint.pretrained import is_of_transformers
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, words_of
from lockstep.ground.types import TrainerFn
from lockstep.loop.device_errors import device_error
from lockstep.module import LightningModule

Teller = Callable[[LightningModule, str, "re.Match[str]"], "str | None"]
"""Given the module, the name of the strategy and what was found in the message: the sentence; None: another case."""

BEFORE_THE_FIT = "Change layers in `__init__` or `configure_model`, before the strategy has taken them."
DTYPES = {"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16}


def in_words(module: LightningModule | None, strategy: str, error: BaseException) -> None:
    """Give an error that has a known cause a message that says it, in place: it is still the one of the user's line."""
    ended = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(ended, StopIteration) and words_of(error) == RAISED_STOP:
        frame = traceback.extract_tb(ended.__traceback__)[-1]
        error.args = (
            f"{frame.name} raised StopIteration, {frame.filename}:{frame.lineno}: a `next()` whose iterator has "
            "ended, say. Give it a default, `next(iterator, None)`, or begin the iterator anew.",
        )
    if module is None or len(error.args) != 1 or isinstance(error, SAID):
        return
    of_devices = device_error(module, error)
    if of_devices is not None:
        error.args = (of_devices,)
        return
    text = words_of(error)
    for form, tell in TOLD:
        found = form.search(text)
        told = None if found is None else tell(module, strategy, found)
        if told is not None:
            error.args = (told,)
            return


SAID = (MisconfigurationException, CorruptCheckpoint, KeyError, OSError)
"""Errors that need no other words."""

RAISED_STOP = "generator raised StopIteration"
"""Python's words, from a generator of ours that a hook ran in."""


def _named(module: nn.Module, which: Callable[[torch.Tensor], bool]) -> str:
    """The first parameters of a kind, by name."""
    names = [repr(name) for name, parameter in module.named_parameters() if which(parameter)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _new_shape(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    old, new = found["old"], found["new"]
    whole = "[" in new
    size = prod(_numbers(new))
    names = _named(module, lambda p: list(p.shape) == _numbers(new) if whole else p.numel() == size)
    if not names:
        return None
    return (
        f"{type(module).__name__}: parameter {names} has another shape ({new}) than when {strategy} took it ({old}): a "
        f"new tensor was put into its `.data`. {BEFORE_THE_FIT}"
    )


def _new_dtype(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    dtype = DTYPES.get(found["new"])
    names = _named(module, lambda parameter: parameter.dtype == dtype)
    if not names:
        return None
    return (
        f"{type(module).__name__}: parameter {names} is {dtype} by now, and was torch.{found['old'].lower()} when "
        f"{strategy} took it: it was converted, or a new tensor was put into its `.data`. Use Trainer(precision=...). "
        f"{BEFORE_THE_FIT}"
    )


def _converted(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}: it was moved or converted (`to`, `half`, `double`) after {strategy} had cut it into "
        f"shards, {found['name']} among them. Use Trainer(precision=..., accelerator=...). {BEFORE_THE_FIT}"
    )


def _again(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    if not module.automatic_optimization:
        return None
    return (
        f"{type(module).__name__}.training_step: its loss leads to a graph that a backward has gone through before. "
        "Either it has called `backward` itself: return the loss, and the Trainer does; or it holds on to a tensor of "
        "an earlier step: keep `tensor.detach()`."
    )


def _no_parameters(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}.configure_optimizers: the optimizer was given no parameters: pass self.parameters(). "
        "Layers in a plain list or dict are not the module's: use nn.ModuleList or nn.ModuleDict."
    )


def _twice(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}.configure_optimizers: parameter {found['name'].removeprefix('module.')!r} is given "
        "to the optimizer twice: give it once."
    )


def _no_matrix(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    names = _named(module, lambda parameter: list(parameter.shape) == _numbers(found["shape"]))
    return (
        f"{type(module).__name__}.configure_optimizers: Muon updates matrices, and was given a parameter of shape "
        f"({found['shape']}), as {names or 'none that the module has'} is. Give it the matrices and another optimizer "
        "the rest: `CombinedOptimizer(Muon([p for p in self.parameters() if p.ndim == 2]), AdamW([p for p in "
        "self.parameters() if p.ndim != 2]))`, of lockstep and torch.optim."
    )


def _meta(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    names = _named(module, lambda parameter: parameter.is_meta)
    if not names:
        return None
    if any(map(is_of_transformers, module.modules())):
        return (
            f"{type(module).__name__}: parameter {names} is on the meta device, and has no values before those of the "
            "folder that `load_pretrained` names are read, behind `configure_model`: what computes with values comes "
            "too early there, as resize_token_embeddings does (it takes a mean). For a larger vocabulary write another "
            "folder, once, and load that: from_pretrained, resize_token_embeddings, save_pretrained(NEW_FOLDER)."
        )
    return (
        f"{type(module).__name__}: parameter {names} is on the meta device, and has no values: make the layer in "
        "`configure_model`, or call `to_empty(device=...)` and initialize it, before the fit."
    )


def _other_device(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}: a parameter was given values of another device ({found.string}). Where weights are "
        "on the meta device (load_pretrained reads them behind `configure_model`), an adapter cannot begin with what "
        "is computed of them (init_lora_weights='pissa' or 'olora', say): use init_lora_weights=True or 'gaussian', or "
        "let the model have its weights before the adapter comes, by from_pretrained in `__init__`."
    )


def _sparse(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    names = [repr(name) for name, layer in module.named_modules() if getattr(layer, "sparse", False) is True]
    if not names:
        return None
    return (
        f"{type(module).__name__}: layer {', '.join(names[:3])} gives sparse gradients (sparse=True), which {strategy} "
        'cannot cut into shards: make it with sparse=False, or use strategy="ddp".'
    )


def _no_scalar(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}.training_step: the loss is no scalar, or none that needs gradients: average it "
        "(`loss.mean()`), compute it without `detach`, `item` and `torch.no_grad`, and see that the parameters it "
        "comes from need gradients."
    )


def _no_output(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}: a layer or step returned what {strategy} cannot look into for tensors: return a "
        'tensor, or a dict, list or tuple of such; of `training_step` the loss, or {"loss": loss}.'
    )


def _through_blocks(module: LightningModule, strategy: str, found: re.Match[str]) -> str:
    return (
        f"{type(module).__name__}.training_step: a backward came to a layer whose parameters {strategy} had freed. "
        "Gradients of gradients (`autograd.grad(..., create_graph=True)`, as of a gradient penalty) cannot go through "
        "a layer that is gathered by itself. Choose other layers by FSDPStrategy(auto_wrap_policy=...), so that these "
        'are gathered with the module, or use strategy="ddp".'
    )


def _outside(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    if "Tensor and DTensor" not in found[0]:
        return None
    return (
        f"{type(module).__name__}: under {strategy} a layer or a parameter that is in shards met a whole tensor, "
        "outside of a step or of the layer that gathers it: call `self(x)`, or a layer that is an attribute of the "
        "module (`self.net(x)`), or do it in a step; trainer.strategy.whole_parameters() gives whole parameters."
    )


def _one_sample(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    if "drop_last" in found.string:
        return None
    # in place: the error is still the one that the user's line raised
    return (
        f"{found.string}. A batch of one sample, the last one of an epoch say, has no statistics: leave it out by "
        "DataLoader(drop_last=True); or, where there are several ranks, take the statistics over the samples of "
        "all by Trainer(sync_batchnorm=True)."
    )


def _no_gradient(module: LightningModule, strategy: str, found: re.Match[str]) -> str | None:
    trainer = module._trainer
    if trainer is None or trainer.state.fn is TrainerFn.FITTING or not trainer.inference_mode:
        return None
    return (
        f"{found.string}. trainer.{trainer.state.fn} runs under torch.inference_mode, in which nothing has a gradient, "
        "under `torch.enable_grad()` neither: a step that takes one, for forces or a penalty say, needs "
        "Trainer(inference_mode=False) besides."
    )


TOLD: list[tuple[re.Pattern[str], Teller]] = [
    (re.compile(form), tell)
    for form, tell in (
        (r"^Expected more than 1 value per channel when training", _one_sample),
        (r"assign a gradient of size '(?P<old>\[[^']*\])' to a tensor of size '(?P<new>\[[^']*\])'", _new_shape),
        (
            r"invalid gradient at index \d+ - got (?P<new>\[[^]]*\]) but expected shape [a-z ]*(?P<old>\[[^]]*\])",
            _new_shape,
        ),
        (r"(?P<new>\d+) != (?P<old>\d+) Cannot reduce scatter gradients", _new_shape),
        (r"gradient with dtype '(?P<old>\w+)' to a tensor with grad_dtype '(?P<new>\w+)'", _new_dtype),
        (r"_apply\(\): Couldn't swap (?P<name>\S+)", _converted),
        (r"backward through the graph a second time", _again),
        (r"optimizer got an empty parameter list", _no_parameters),
        (r"Parameter with name: (?P<name>\S+) occurs multiple times in optimizer", _twice),
        (r"^Muon only supports 2D parameters whereas .*\(\[(?P<shape>[^]]*)\]\)", _no_matrix),
        (r"set_data\(tensor\).*incompatible tensor type", _other_device),
        (r"Sparse(CPU|CUDA)' backend|between dense and sparse Tensors", _sparse),
        (r"loss must be a scalar tensor\. If you need", _no_scalar),
        (r"^vars\(\) argument must have __dict__ attribute", _no_output),
        (r"got mixed torch\.Tensor and DTensor", _outside),
        (r"does not require grad and does not have a grad_fn|Inference tensors cannot be saved", _no_gradient),
        (r"^setStorage: .* storage of size 0", _through_blocks),
        (r"meta|CUDA enabled|list index out of range|has no attribute 'ds_tensor'", _meta),
    )
]
"""Forms of raw messages, and what tells the cause of each."""
