"""The backward of a stage in two parts: of its input, for which the stage before waits, and of its weights, later.

torch's own parts are not used. They run hooks of tensors twice, each time on what the one before has made of a
gradient; count parameters twice that are used in several places; let parameters share the memory of one gradient; and
leave out hooks of parameters, and parameters to which no path leads that passes the input.

The graph of a stage has nodes from which a path leads to the input. From some of them, the borders, paths branch off to
weights alone. The input's part runs the former, and keeps what arrives at the borders. The weights' part goes on from
there. See "Zero Bubble Pipeline Parallelism" (Qi et al., arXiv:2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.parameter import Parameter

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Group:
    """Weights that have borders in common, and with them a pass of the weights' part.

    Attributes:
        weights: by the node that ends their path.
        arrived: what came to each border in the input's part.
    """

    weights: dict[Node, Parameter] = field(default_factory=dict)
    arrived: dict[Node, Gradients] = field(default_factory=dict)


def split_backward(stage: PipelineStage, weights: Sequence[Parameter]) -> None:
    """Let a stage of torch's have this backward, where a schedule asks for one in parts.

    Args:
        stage: of torch's.
        weights: that its forward and its loss may use.
    """
    whole: Callable[..., Any] = stage.backward_maybe_with_nosync

    def backward(kind: str, given: dict[str, Any], last_backward: bool = False) -> Any:
        if kind == "weight":
            of_weights(given["param_groups"])
            return (), None
        shown = given["stage_output"]
        roots: Any = _root_of(shown) if isinstance(shown, Tensor) else tuple(map(_root_of, shown))
        if kind == "input":
            given["stage_output"] = ()  # torch would keep it for the weights' part
            return of_input(roots, given["output_grads"], given["input_values"], weights)
        return whole(kind, {**given, "stage_output": roots}, last_backward=last_backward)

    vars(stage)["backward_maybe_with_nosync"] = backward


_ROOT = "lockstep_root"


def without_graph(tensor: Tensor) -> Tensor:
    """The same values for torch, which keeps what a stage gives for longer than its graph shall live."""
    shown = tensor.detach().requires_grad_(tensor.requires_grad)
    vars(shown)[_ROOT] = tensor
    return shown


def with_graph(shown: Tensor) -> Tensor:
    """What :func:`without_graph` was given."""
    root: Tensor = vars(shown)[_ROOT]
    return root


def _root_of(shown: Tensor) -> Tensor:
    root: Tensor = vars(shown).pop(_ROOT, shown)
    return root


def of_input(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[object],
    weights: Sequence[Parameter],
) -> tuple[Gradients, list[_Group]]:
    """The input's part.

    Args:
        outputs: one tensor: what the stage gives, or its loss.
        gradients: of it; None: one.
        inputs: leaves, among other things.
        weights: that may be in the graph.

    Returns:
        gradients of the inputs, and what is left for the weights.
    """
    given = [torch.ones_like(each) for each in outputs] if gradients is None else gradients
    pairs = [(each, gradient) for each, gradient in zip(outputs, given, strict=True) if each.grad_fn is not None]
    roots, arriving = [each for each, _ in pairs], [gradient for _, gradient in pairs]
    leaves = {number: each for number, each in enumerate(inputs) if isinstance(each, Tensor) and each.requires_grad}
    ends = {get_gradient_edge(leaf).node for leaf in leaves.values()}
    above = _above([each.grad_fn for each in roots])
    of_inputs: list[Tensor | None] = [None] * len(inputs)
    if ends.isdisjoint(above):  # no path leads to the input
        if roots:
            torch.autograd.backward(roots, arriving)
        return tuple(of_inputs), []
    groups = _groups(above, _climbed(ends, above, set()), weights)
    hooks = [
        border.register_prehook(partial(_note, group.arrived, border)) for group in groups for border in group.arrived
    ]
    try:
        found = torch.autograd.grad(roots, list(leaves.values()), arriving, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for number, gradient in zip(leaves, found, strict=True):
        of_inputs[number] = gradient
    return tuple(of_inputs), groups


def of_weights(groups: list[_Group]) -> None:
    """The weights' part: gradients are added to the parameters' own."""
    for group in groups:
        there = [
            (GradientEdge(border, number), gradient)
            for border, arrived in group.arrived.items()
            for number, gradient in enumerate(arrived)
            if gradient is not None
        ]
        if not there:
            continue
        edges, given = zip(*there, strict=True)
        # hooks of tensors run again, and borders may follow one another: what arrived counts, and counts once
        hooks = [border.register_prehook(partial(_instead, came)) for border, came in group.arrived.items() if came]
        ends = [GradientEdge(node, 0) for node in group.weights]
        try:
            found = torch.autograd.grad(edges, ends, given, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        for weight, gradient in zip(group.weights.values(), found, strict=True):
            if gradient is not None:
                _add(weight, gradient)
    groups.clear()


def _note(arrived: dict[Node, Gradients], border: Node, gradients: Gradients) -> None:
    arrived[border] = gradients


def _instead(arrived: Gradients, gradients: Gradients) -> Gradients:
    return arrived


def _add(weight: Parameter, gradient: Tensor) -> None:
    """As the end of a backward does it; ``gradient`` may be another weight's, too, or on its way to another rank."""
    if weight.grad is None:
        weight.grad = gradient.clone()
    else:
        weight.grad.add_(gradient)
    for hook in dict(weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)


def _above(roots: Sequence[Node | None]) -> dict[Node, list[Node]]:
    """All nodes of a graph, and for each the nodes that lead to it."""
    found: dict[Node, list[Node]] = {root: [] for root in roots if root is not None}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in found:
                found[following] = []
                waiting.append(following)
            found[following].append(node)
    return found


def _climbed(ends: set[Node], above: dict[Node, list[Node]], until: set[Node]) -> set[Node]:
    """The nodes from which a path leads to one of the ends; those of ``until`` end a path upwards, and are in it."""
    found = {end for end in ends if end in above}
    waiting = list(found)
    while waiting:
        node = waiting.pop()
        for before in () if node in until else above[node]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def _groups(above: dict[Node, list[Node]], passes: set[Node], weights: Sequence[Parameter]) -> list[_Group]:
    """The weights of a graph, by their borders.

    Args:
        above: the graph.
        passes: nodes from which a path leads to the input.
        weights: that may be in it.
    """
    of_border: dict[Node, _Group] = {}
    for weight in weights:
        end = get_gradient_edge(weight).node if weight.requires_grad else None
        if end is None or end not in above:
            continue
        group = _Group({end: weight})
        for border in _climbed({end}, above, passes) & passes:
            group.arrived[border] = ()
            other = of_border.get(border, group)
            group.weights.update(other.weights)
            group.arrived.update(other.arrived)
        of_border.update(dict.fromkeys(group.arrived, group))
    return list({id(group): group for group in of_border.values()}.values())
