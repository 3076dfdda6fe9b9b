"""Compares torch's backward in two parts, of zero-bubble schedules, with a whole one, and refuses where it differs.

torch finds the weights of a stage by the graph between its output and its input. It leaves out parameters from which no
path leads through the input, hooks that run once a gradient is there, and all where the input needs no gradient; it
frees parts of the graph that others still need; and older releases count a parameter twice that has several uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import Parameter

from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Gradients = Sequence[Tensor | None]


class SplitCheck:
    """Watches the backwards of a stage of torch's.

    The first one is compared with a whole backward, and each later one whose graph has another form.

    Args:
        stage: of torch's; its own backward is called by this.
        weights: the parameters that its forward and its loss may use.
        blocks: of the chain that are in this stage, by their names.
    """

    def __init__(self, stage: PipelineStage, weights: Sequence[Parameter], blocks: Mapping[str, nn.Module]) -> None:
        self._weights = weights
        self._blocks = blocks
        self._backward = stage.backward_maybe_with_nosync
        self._compared: set[tuple[tuple[int, int], ...]] = set()
        self._waiting: dict[int, tuple[Gradients, Gradients]] = {}
        vars(stage)["backward_maybe_with_nosync"] = self._watched

    def _watched(self, kind: str, given: dict[str, Any], last_backward: bool = False) -> Any:
        if kind == "weight":
            return self._of_weights(given, last_backward)
        return self._of_input(given, last_backward) if kind == "input" else self._backward(kind, given, last_backward)

    def _of_input(self, given: dict[str, Any], last_backward: bool) -> Any:
        outputs = given["stage_output"]
        arrived = given["output_grads"] or [torch.ones_like(output) for output in outputs]
        pairs = [(output, gradient) for output, gradient in zip(outputs, arrived, strict=True) if output.requires_grad]
        begins = [get_gradient_edge(output) for output, _ in pairs]  # torch detaches the outputs in place
        found, groups = self._run("input", given, last_backward)
        form = tuple(sorted((len(group["params"]), len(group["intermediates"])) for group in groups))
        if begins and form not in self._compared:
            self._compared.add(form)
            ends = [each for each in (*given["input_values"], *self._weights) if each.requires_grad]
            came = [gradient for _, gradient in pairs]
            gradients = torch.autograd.grad(begins, ends, came, retain_graph=True, allow_unused=True)
            whole = dict(zip(map(id, ends), gradients, strict=True))
            for value, gradient in zip(given["input_values"], found, strict=True):
                self._compare("its input", gradient, whole.get(id(value)))
            self._waiting[id(groups)] = [whole.get(id(weight)) for weight in self._weights], found
        return found, groups

    def _of_weights(self, given: dict[str, Any], last_backward: bool) -> Any:
        whole, of_inputs = self._waiting.pop(id(given["param_groups"]), (None, ()))
        if whole is None:
            return self._run("weight", given, last_backward)
        before = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None
        result = self._run("weight", given, last_backward)
        taken = {gradient.data_ptr() for gradient in of_inputs if gradient is not None}
        names = {
            id(each): f"{name}.{of}" for name, block in self._blocks.items() for of, each in block.named_parameters()
        }
        for weight, gradient, old in zip(self._weights, whole, before, strict=True):
            what = names.get(id(weight), f"the parameter of shape {tuple(weight.shape)} outside of the chain")
            if weight._post_accumulate_grad_hooks:
                self._refuse(f"{what} has a hook that runs once its gradient is there, which torch does not call")
            self._compare(what, weight.grad, gradient)
            if weight.grad is not None:
                if weight.numel() and weight.grad.data_ptr() in taken:
                    self._refuse(f"the gradient that torch gives {what} is another tensor's, too")
                taken.add(weight.grad.data_ptr())
                weight.grad = weight.grad if old is None else old.add_(weight.grad)
            else:
                weight.grad = old
        return result

    def _run(self, kind: str, given: dict[str, Any], last_backward: bool) -> Any:
        try:
            return self._backward(kind, given, last_backward)
        except RuntimeError as error:
            raise self._error(f"torch's part of the {kind} fails ({error.__cause__ or error})") from error

    def _compare(self, what: str, found: Tensor | None, whole: Tensor | None) -> None:
        if whole is None or not whole.isfinite().all():  # a loss that is scaled too much
            return
        near = torch.finfo(whole.dtype).eps ** 0.5
        off = whole.abs().max() if found is None else (found - whole).abs().max()
        if whole.numel() and off > near * whole.abs().max():
            self._refuse(f"torch gives {what} another gradient in two parts than in one")

    def _refuse(self, why: str) -> NoReturn:
        raise self._error(why)

    def _error(self, why: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"BalancedStrategy(schedule='zero-bubble') runs the backward of a stage in two parts, as torch does it. In "
            f"the stage of the blocks {', '.join(self._blocks)} that is wrong: {why}. Choose schedule='1f1b' or "
            "'interleaved'."
        )
