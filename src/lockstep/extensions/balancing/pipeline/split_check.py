"""Check of torch's two-part backward, which zero-bubble schedules use, against an ordinary backward.

torch finds the weights of a stage in the graph between its output and its input. It omits parameters that are not on a
path to the input, hooks on accumulated gradients, and everything if the input needs no gradient. It frees parts of the
graph that are still needed. Older releases count a parameter with several uses twice. All this is refused.
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
    """Check that the two-part backward of one of torch's pipeline stages computes correct gradients.

    The first backward is compared with an ordinary one, and so is each later one whose graph has a different form.

    Args:
        stage: torch's stage; its backward is replaced.
        weights: parameters that the stage's forward and the loss may use.
        blocks: blocks of the chain in this stage, by name.
    """

    def __init__(self, stage: PipelineStage, weights: Sequence[Parameter], blocks: Mapping[str, nn.Module]) -> None:
        self._weights = weights
        self._blocks = blocks
        self._backward = stage.backward_maybe_with_nosync
        self._compared: set[tuple[tuple[int, int], ...]] = set()
        self._pending: dict[int, tuple[Gradients, Gradients]] = {}
        vars(stage)["backward_maybe_with_nosync"] = self._run_checked

    def _run_checked(self, kind: str, given: dict[str, Any], last_backward: bool = False) -> Any:
        if kind == "weight":
            return self._run_weights(given, last_backward)
        return self._run_input(given, last_backward) if kind == "input" else self._backward(kind, given, last_backward)

    def _run_input(self, given: dict[str, Any], last_backward: bool) -> Any:
        """Compute the input's gradient as part one of a backward. Check the gradient once per graph structure."""
        outputs = given["stage_output"]
        arrived = given["output_grads"] or [torch.ones_like(output) for output in outputs]
        pairs = [(output, gradient) for output, gradient in zip(outputs, arrived, strict=True) if output.requires_grad]
        # torch detaches the outputs in place: the edges keep the graph for the whole backward below
        edges = [get_gradient_edge(output) for output, _ in pairs]
        found, groups = self._run("input", given, last_backward)
        form = tuple(sorted((len(group["params"]), len(group["intermediates"])) for group in groups))
        if edges and form not in self._compared:
            self._compared.add(form)
            ends = [each for each in (*given["input_values"], *self._weights) if each.requires_grad]
            of_outputs = [gradient for _, gradient in pairs]
            gradients = torch.autograd.grad(edges, ends, of_outputs, retain_graph=True, allow_unused=True)
            whole = dict(zip(map(id, ends), gradients, strict=True))
            for value, gradient in zip(given["input_values"], found, strict=True):
                self._compare("the stage's input", gradient, whole.get(id(value)))
            self._pending[id(groups)] = [whole.get(id(weight)) for weight in self._weights], found
        return found, groups

    def _run_weights(self, given: dict[str, Any], last_backward: bool) -> Any:
        """Compute the weights' gradients as part two of a backward. Check these gradients if part one was checked."""
        whole, of_inputs = self._pending.pop(id(given["param_groups"]), (None, ()))
        if whole is None:
            return self._run("weight", given, last_backward)
        # gradients of earlier micro-batches are set aside, and added again below
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
                self._refuse(f"{what} has a post-accumulate-grad hook, which the backward in two parts does not call")
            self._compare(what, weight.grad, gradient)
            if weight.grad is not None:
                # adding to a gradient in place would change another one in the same memory
                if weight.numel() and weight.grad.data_ptr() in taken:
                    self._refuse(f"torch computes a gradient for {what} that shares memory with another gradient")
                taken.add(weight.grad.data_ptr())
                weight.grad = weight.grad if old is None else old.add_(weight.grad)
            else:
                weight.grad = old
        return result

    def _run(self, kind: str, given: dict[str, Any], last_backward: bool) -> Any:
        try:
            return self._backward(kind, given, last_backward)
        except RuntimeError as error:
            raise self._error(f"the part for the {kind} gradients fails ({error.__cause__ or error})") from error

    def _compare(self, what: str, found: Tensor | None, whole: Tensor | None) -> None:
        if whole is None or not whole.isfinite().all():  # such as by a loss scale that is too large
            return
        near = torch.finfo(whole.dtype).eps ** 0.5
        off = whole.abs().max() if found is None else (found - whole).abs().max()
        if whole.numel() and off > near * whole.abs().max():
            self._refuse(f"the gradient of {what} differs from that of an ordinary backward")

    def _refuse(self, why: str) -> NoReturn:
        raise self._error(why)

    def _error(self, why: str) -> MisconfigurationException:
        return MisconfigurationException(
            f"BalancedStrategy(schedule='zero-bubble'): torch's backward in two parts (input gradients, then weight "
            f"gradients) is wrong in the stage of the blocks {', '.join(self._blocks)}: {why}. Choose "
            "schedule='1f1b' or 'interleaved'."
        )
