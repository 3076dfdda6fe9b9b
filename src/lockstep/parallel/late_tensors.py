"""Parameters and buffers that come into a run after set-up: all ranks take them in together, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.parallel.late_parameters import LateParameters, beside
from lockstep.parallel.rendezvous import Rendezvous
from lockstep.parallel.rollcall import checksum
from lockstep.parallel.start import check_alike, described

Take = Callable[["dict[str, Tensor]", "list[Tensor]"], None]


class LateTensors:
    """Finds what comes into the module or its optimizers after set-up, and lets all ranks take it in together.

    A module may get a parameter at any time: a new head, ``weight_norm``, ``load_state_dict(assign=True)``; and so may
    an optimizer (``add_param_group``), also one that no module has. What a rank notices waits for the next *point*:
    the beginning of a forward that trains, of a backward that reduces, or of an evaluation, which all ranks pass alike.
    There they compare what has come, take rank 0's values, and go on with it. A rank that comes there alone raises.

    After a forward its values can no longer be replaced: what came within a training step has to be alike by itself.

    The constructor is collective.

    Args:
        module: of the run.
        align: whether rank 0's values are taken; else the caller answers for their being alike.
        take: called, on all ranks together, with all parameters by name and the late buffers.

    Attributes:
        frozen: parameters that are not reduced, as they required no gradients so far.
    """

    def __init__(self, module: nn.Module, align: bool, take: Take) -> None:
        self._module, self._align, self._take = module, align, take
        self._optimizers: list[Any] = []
        self._watch = LateParameters(module)
        self._points = Rendezvous()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> True
        self._buffers: set[str] = set()
        self._sizes: list[tuple[Any, int, int, int]] = []
        self.frozen: Sequence[Tensor] = ()
        self._remember(self.parameters())

    def parameters(self) -> dict[str, Tensor]:
        """The module's parameters by name, and those that the optimizers alone have."""
        return {**dict(self._module.named_parameters()), **beside(self._module, self._optimizers)}

    def use_optimizers(self, optimizers: list[Any]) -> None:
        """Look at these optimizers from now on; take in what they have and the module has got since."""
        self._optimizers = optimizers
        late = [name for name, parameter in self.parameters().items() if parameter not in self._known]
        if late or self._watch.noticed:
            self._meet(used=False, first=True)
        self._points.reach()
        self._count()

    def change_optimizers(self, optimizers: list[Any]) -> None:
        """Others have taken the place of the optimizers in the middle of a fit. Collective."""
        self._optimizers = optimizers
        self._meet(used=False)

    # -- points. Each costs a call, some attributes and the length of a list or two.

    def forward_begins(self) -> None:
        """Before a forward that trains."""
        for optimizer, count, first, last in self._sizes:  # whether it has got a group, or its first or last one more
            groups = optimizer.param_groups
            if len(groups) != count or len(groups[0]["params"]) != first or len(groups[-1]["params"]) != last:
                self._watch.noticed = True
        if self._watch.noticed:
            self._meet(used=False)
        self._points.reach()

    def backward_begins(self) -> None:
        """Before a backward that reduces."""
        if self._watch.noticed or (self.frozen and any(parameter.requires_grad for parameter in self.frozen)):
            self._meet(used=True)
        self._points.reach()

    def look(self) -> None:
        """Where there is time, between epochs and before an evaluation: also for what torch does not tell of."""
        late = any(parameter not in self._known for parameter in self.parameters().values())
        if late or self._watch.noticed or not self._buffers.issuperset(dict(self._module.named_buffers())):
            self._meet(used=False)
        self._points.reach()

    def _count(self) -> None:
        self._sizes = [
            (optimizer, len(groups), len(groups[0]["params"]), len(groups[-1]["params"]))
            for optimizer, groups in ((optimizer, optimizer.param_groups) for optimizer in self._optimizers)
            if groups
        ]

    # -- all ranks together

    def _meet(self, used: bool, first: bool = False) -> None:
        """Compare what has come, take rank 0's values, and hand it over. Collective, of ranks that came here alike.

        Args:
            used: whether a forward may have used it.
            first: whether the optimizers are those of a fit's beginning, which nobody has taken in so far.

        Raises:
            MisconfigurationException: another rank has passed this point, or has something else, or other values.
        """
        parameters, buffers = self.parameters(), dict(self._module.named_buffers())
        known = self._known
        late = {name: parameter for name, parameter in parameters.items() if parameter not in known}
        late_buffers = {name: buffer for name, buffer in buffers.items() if name not in self._buffers}
        self._points.meet(self._told(late, late_buffers, parameters))
        lines = [described("parameter", name, tensor, ", late" * (name in late)) for name, tensor in parameters.items()]
        lines += [described("buffer", name, tensor, ", late") for name, tensor in late_buffers.items()]
        for optimizer in self._optimizers:
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            lines.append(f"{type(optimizer).__name__} with groups of {sizes} parameters")
        check_alike(type(self._module).__name__, lines, None)
        for name, tensor in late.items():
            if isinstance(tensor, UninitializedParameter):
                raise MisconfigurationException(
                    f"parameter {name!r} came after set-up and belongs to a lazy module without a shape yet: run a "
                    "batch through the layer before it is given to the module"
                )
        if self._align:
            self._take_values({**late, **late_buffers}, used)
        self._remember(parameters)
        self._count()
        if not first:
            self._take(parameters, list(late_buffers.values()))

    def _told(self, late: dict[str, Tensor], late_buffers: dict[str, Tensor], parameters: dict[str, Tensor]) -> str:
        """What this rank has found, as a sentence's beginning."""
        for kind, found in (("parameter", late), ("buffer", late_buffers)):
            for name in found:
                return f"{kind} {name!r} came after set-up"
        for name, parameter in parameters.items():
            if parameter.requires_grad and any(parameter is frozen for frozen in self.frozen):
                return f"parameter {name!r} was thawed (requires_grad)"
        return "a submodule came after set-up, or an optimizer or its groups have changed"

    def _take_values(self, late: dict[str, Tensor], used: bool) -> None:
        """Give all ranks rank 0's values, but where a forward has used those that this rank has."""
        mine = {name: checksum(tensor) for name, tensor in late.items() if used or tensor.grad is not None}
        of_ranks: list[dict[str, int]] = comm.all_gather_object(mine)
        touched = sorted({name for theirs in of_ranks for name in theirs})
        if touched:
            sums = comm.all_gather_object([checksum(late[name]) for name in touched])
            for name, *values in zip(touched, *sums, strict=True):
                if len(set(values)) > 1:
                    raise MisconfigurationException(
                        f"{name!r} came after set-up, was used in a training step at once, and has not the same values "
                        "on all ranks: add it before the step (in on_train_batch_start, say), where all ranks take "
                        "rank 0's, or make it alike on all ranks (zeros, or drawn from a generator with a seed)"
                    )
        comm.broadcast_tensors([late[name] for name in late if name not in touched])

    def _remember(self, parameters: dict[str, Tensor]) -> None:
        self._watch.renew(self._module)
        self._buffers = {name for name, _ in self._module.named_buffers()}
        for parameter in parameters.values():
            self._known[parameter] = True

    def close(self) -> None:
        """The run is over."""
        self._watch.close()
        self._points.close()
