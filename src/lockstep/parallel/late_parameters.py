"""Parameters and buffers that come into a model after it was set up: noticed, and taken in by all ranks together."""

from __future__ import annotations

import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import MODULE_HOOKS
from lockstep.ground.pages import common_pages, on_one_host
from lockstep.ground.parameters import plain_name
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.consistency import check_alike, checksum, described
from lockstep.parallel.shared_memory import timeout_of

# -- what comes ----------------------------------------------------------------------------------------------


class LateParameters:
    """Notices parameters and buffers that come into ``module`` from now on; costs nothing in a forward.

    Torch tells of each registration. What goes around it (``ModuleList.insert``) is not noticed.

    Args:
        module: the model.
        ignored: names that may come.

    Attributes:
        found: name of the first parameter that came, below the submodule that got it; None while none has.
        changed: whether submodules have come.
        noticed: whether a parameter, a buffer or a submodule has come; whoever has dealt with it sets it to False.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self.found: str | None = None
        self.changed = False
        self.noticed = False
        self._names = weakref.WeakKeyDictionary({part: name for name, part in module.named_modules()})
        # weakly: the id of one that is gone may be that of a late one
        known = {parameter: name for name, parameter in module.named_parameters() if name not in self._ignored}
        self._known = WeakIdKeyDictionary(known)
        _hear()
        _watching.add(self)

    def close(self) -> None:
        _watching.discard(self)

    def renew(self, module: nn.Module) -> None:
        """From now on take for late what is not in ``module`` now."""
        self._names.update({part: name for name, part in module.named_modules()})
        self._known.update({parameter: name for name, parameter in module.named_parameters()})
        self.found, self.noticed = None, False

    def _parameter_comes(self, module: nn.Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and parameter not in self._known and module in self._names:
            self._note(f"{self._names[module]}.{name}".lstrip("."))

    def _buffer_comes(self, module: nn.Module) -> None:
        if module in self._names:
            self.noticed = True

    def _module_comes(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is None or module not in self._names:
            return
        self.changed = self.noticed = True
        for inner, submodule in part.named_modules(prefix=f"{self._names[module]}.{name}".lstrip(".")):
            self._names[submodule] = inner
        for inner, parameter in part.named_parameters():
            if parameter not in self._known:
                self._note(f"{self._names[part]}.{inner}")

    def _note(self, name: str) -> None:
        if name in self._ignored:
            return
        self.noticed = True
        if not self.found:
            self.found = name


def find_changed(frozen: Mapping[str, Parameter], late: LateParameters | None) -> str | None:
    """Whose gradient would not be averaged, if anybody's: a sentence without its beginning, the rank.

    Args:
        frozen: parameters that were so when the model was wrapped.
        late: those since then; None where nobody minds.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            return (
                f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now: wrap the model "
                "with the parameter unfrozen (requires_grad may be switched off, and on again, afterwards), or wrap it "
                "again now"
            )
    if late is not None and late.found is not None:
        return (
            f"parameter {late.found!r} was added to the model after it was wrapped, and its gradient would not be "
            "averaged: add it before, or wrap model.module again"
        )
    return None


def find_cast(buckets: Iterable[Bucket]) -> str | None:
    """Which parameter no longer fits into its bucket, if any: a sentence without its beginning, the rank."""
    for bucket in buckets:
        for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=False):
            before, now = [(t.dtype, tuple(t.shape), t.device) for t in (view, parameter)]
            if now != before:
                return (
                    f"parameter {name!r} has become {now[0]} of shape {now[1]} on {now[2]} since the model was "
                    f"wrapped, and was {before[0]} of shape {before[1]} on {before[2]}: cast or move the container, "
                    "which follows, and not the module in it"
                )
    return None


def beside(module: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """What ``optimizers`` train and ``module`` does not have (parameters in a plain list), by its place there."""
    seen = {id(parameter) for parameter in module.parameters()}
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            parameters = group["params"]
            # the list's own iterator: one of a sharded optimizer would wait for what is under way
            plain = list.__iter__(parameters) if isinstance(parameters, list) else parameters
            for index, parameter in enumerate(plain):
                trained = isinstance(parameter, Parameter) or parameter.requires_grad
                if trained and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"optimizers[{number}].param_groups[{place}]['params'][{index}]"] = parameter
    return found


_watching: weakref.WeakSet[LateParameters] = weakref.WeakSet()


def _hear() -> None:
    """Once: be told by torch, from now on until the process ends.

    A hook for each model would have to go with it: in the middle of torch's loop over the hooks, it may be, which the
    garbage collector does not ask about.
    """
    MODULE_HOOKS.install(_put_hooks)


def _put_hooks() -> Callable[[], object]:
    put = [
        registration.register_module_parameter_registration_hook(_tell_parameter),
        registration.register_module_buffer_registration_hook(_tell_buffer),
        registration.register_module_module_registration_hook(_tell_module),
    ]

    def undo() -> None:
        for each in put:
            each.remove()

    return undo


def _tell_parameter(module: nn.Module, name: str, parameter: Parameter | None) -> None:
    for late in list(_watching):
        late._parameter_comes(module, name, parameter)


def _tell_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    # `self.count = self.count + 1` registers a buffer in each step, in the place of the one before
    if buffer is None or module._buffers.get(name) is not None:
        return
    for late in list(_watching):
        late._buffer_comes(module)


def _tell_module(module: nn.Module, name: str, part: nn.Module | None) -> None:
    for late in list(_watching):
        late._module_comes(module, name, part)


# -- where ranks meet ----------------------------------------------------------------------------------------


WAIT = 0.002
"""Seconds between two looks at whether the others have come."""


class Rendezvous:
    """Counts points that every rank of a group passes in the same order, and lets all ranks meet at one of them.

    A rank that has found something calls `meet` in the place of `reach`. If all of them have, they go on to their
    collectives together. If another rank has gone past the point, the one who waits raises: there the other's next
    collective would be another one than here, and both would hang.

    On one host each rank writes the number of its last point into memory that all of them see. Across hosts nobody
    sees how far another rank is; a rank that meets alone then waits as long as a collective of the group would.

    The constructor is collective.
    """

    def __init__(self, group: comm.Group = None) -> None:
        self._group = group
        self._rank, self._world = comm.rank(group), comm.world_size(group)
        self._number = 0  # of the last point
        self._page: mmap.mmap | None = None
        self._cells: memoryview | list[int] = [0] * self._world
        if self._world > 1:
            self._key = "lockstep/rendezvous/" + comm.broadcast_object(secrets.token_hex(8), 0, group)
            if on_one_host(group):
                self._share_cells()

    def _share_cells(self) -> None:
        size = -(-8 * self._world // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = common_pages(self._group, size, on_disk=True)
        if pages is not None:
            os.close(pages.handle)
            self._page, self._cells = pages.memory, memoryview(pages.memory).cast("q")

    def reach(self) -> None:
        """Pass the next point; 0.1 us."""
        self._number = number = self._number + 1
        self._cells[self._rank] = number

    def meet(self, found: str) -> None:
        """Wait at the next point until all ranks have come there to meet, then pass it.

        Raises:
            MisconfigurationException: another rank has passed the point, or did not come within the group's timeout.
        """
        number = self._number + 1
        if self._world > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{self._key}/{number}/{self._rank}", "1")
            until = time.monotonic() + timeout_of(self._group)
            for other in range(self._world):
                self._await(store, number, other, found, until)
            comm.barrier(self._group)  # nobody passes while another still looks
        self.reach()

    def _await(self, store: dist.Store, number: int, other: int, found: str, until: float) -> None:
        key = f"{self._key}/{number}/{other}"
        while not store.check([key]):
            passed = self._cells[other] >= number and not store.check([key])
            if passed or time.monotonic() > until:
                how = "came to the same point without" if passed else "did not come to the same point in time"
                raise MisconfigurationException(
                    f"rank {self._rank}: {found}, and rank {other} {how}: do it on every rank, at the same point of "
                    "the program; nothing in it may depend on the rank"
                )
            time.sleep(WAIT)

    def close(self) -> None:
        if self._page is not None:
            self._cells.release()  # type: ignore[union-attr]
            self._page.close()
            self._page, self._cells = None, [0] * self._world


# -- taken in together ---------------------------------------------------------------------------------------


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
        own = {plain_name(name): parameter for name, parameter in self._module.named_parameters()}
        return {**own, **beside(self._module, self._optimizers)}

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
        self._watch.close()
        self._points.close()
