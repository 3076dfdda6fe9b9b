"""DeepSpeed's engine around a module and its optimizer: one window after the other, and what it holds."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint.flat_part import FlatPart
from lockstep.extensions.deepspeed.left_alone import LeftAlone
from lockstep.extensions.deepspeed.partition import align_numbers, lean_linear, span
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import is_partitioned
from lockstep.ground.tree import tensors_in

DIFFERENT = (
    "DeepSpeed adds up gradients in the order in which they come, and the ranks differ: rank {rank} has {theirs} where "
    "rank 0 has {zero}. Let all ranks use the same parameters in the same order in each micro-batch, or train with "
    'strategy="ddp" or "fsdp", which know them apart.'
)


class Door(nn.Module):
    """The engine's module: it calls what it is given, so that all of the user's methods run inside the engine's hooks.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        """Call ``work``."""
        return work()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's own."""
        return self.module.load_state_dict(*args, **kwargs)


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank updates.

    Attributes:
        flat: the engine's float32 tensor in which it lies, a parameter of the optimizer that steps.
        place: of its first element there.
        start: of its first element in the flattened parameter.
        size: number of elements.
    """

    flat: Tensor
    place: int
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of a tensor as long as ``flat``."""
        return tensor.narrow(0, self.place, self.size)

    def cut(self, whole: Tensor) -> Tensor:
        """The elements of a whole tensor."""
        return whole.flatten()[self.start : self.start + self.size]


class ZeroEngine:
    """A module that DeepSpeed trains with ZeRO stage 1, 2 or 3. Making it is collective.

    The optimizer stays as the user has made it, parameters and all; the engine steps a copy, which has the ranks' own
    float32 partitions for parameters, and takes over learning rates and the like before each step.

    Args:
        module: on its device; for stage 3 in partitions.
        optimizer: of its parameters.
        config: of the engine, with ``gradient_accumulation_steps`` 1.
        exact: by a parameter's id, values of this rank's elements that are more exact than the module's.

    Attributes:
        engine: DeepSpeed's.
        stage: of ZeRO.
        pieces: by a parameter's id, the part that this rank updates, where it has one.
        has_gradients: a window's gradients are whole, and not yet used.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], exact: Mapping[int, Tensor]
    ) -> None:
        import deepspeed

        self.module, self.optimizer = module, optimizer
        self._inner, self._groups = _copy_of(optimizer)
        door = Door(module)
        rounds = any(config.get(block, {}).get("enabled") for block in ("bf16", "fp16"))
        before = {id(p): p.data for p in module.parameters() if rounds and not is_partitioned(p)}
        align_numbers()
        with _values_alike(), _adagrad_as_it_is():
            self.engine: Any = deepspeed.initialize(model=door, optimizer=self._inner, config=dict(config))[0]
        self.zero: Any = self.engine.optimizer
        self._stepping = self.zero.optimizer
        names = self.engine.param_names
        for parameter in names:
            names[parameter] = names[parameter].removeprefix("module.")
        for group in getattr(self.zero, "_param_slice_mappings", ()):
            for name in list(group):
                group[name.removeprefix("module.")] = group.pop(name)
        self.stage = int(self.engine.zero_optimization_stage())
        self._clips_by = float(self.engine.gradient_clipping())
        self.has_gradients = False
        self.parameters: dict[str, Parameter] = {
            name: p for name, p in module.named_parameters() if id(p) in self._trained()
        }
        self._known = {id(p) for p in self.parameters.values()}
        self.pieces = {id(p): piece for p in self._trained().values() for piece in [self._piece(p)] if piece}
        self._offloads = bool(getattr(self.zero, "offload_optimizer", getattr(self.zero, "cpu_offload", False)))
        self._rounds = rounds
        self._versions = self._versions_now()
        known = {id(p): name for name, p in self.parameters.items()}
        swaps = bool(getattr(self.zero, "swap_optimizer", False))
        self._left_alone = LeftAlone(self._stepping, self._flats, self._trained_groups, self.pieces, known, swaps)
        self._take_exact(before, exact)
        self._used: set[int] = set()  # ids of parameters with a gradient in the window
        self._order: list[int] = []  # of a window's gradients, as they came into the engine's buckets
        self._note_order()
        if optimizer.state:  # an Adagrad's from the beginning, or those that the user has loaded
            self.load_optimizer_state(optimizer.state_dict())

    @property
    def _trained_groups(self) -> list[list[Parameter]]:
        groups: list[list[Parameter]] = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return groups

    def _trained(self) -> dict[int, Parameter]:
        return {id(p): p for group in self._trained_groups for p in group}

    @property
    def _flats(self) -> list[Tensor]:
        """The float32 tensors that the optimizer steps."""
        zero = self.zero
        flats: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return flats

    def _piece(self, parameter: Any) -> Piece | None:
        if self.stage == 3:
            group, place, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start, size = span(parameter.ds_numel, comm.rank(), comm.world_size())
            return Piece(self.zero.fp32_partitioned_groups_flat[group], place, start, size) if size else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        high, low = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        return Piece(flat, high.start, low.start, high.numel)

    def _take_exact(self, before: Mapping[int, Tensor], exact: Mapping[int, Tensor]) -> None:
        """Let the engine's float32 weights be those of the module before it was rounded."""
        with torch.no_grad():
            for key, piece in self.pieces.items():
                if key in exact:
                    whole = exact[key].numel() != piece.size
                    piece.of(piece.flat).copy_(piece.cut(exact[key]) if whole else exact[key])
                elif key in before:
                    piece.of(piece.flat).copy_(piece.cut(before[key]))

    def _note_order(self) -> None:
        """Note which gradient comes when: the engine adds up what lies at the same place of the ranks' buckets."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters.values())}
        put = self.zero.reduce_independent_p_g_buckets_and_remove_grads

        def noted(parameter: Parameter, *args: Any) -> None:
            self._order.append(numbers[id(parameter)])
            put(parameter, *args)

        self.zero.reduce_independent_p_g_buckets_and_remove_grads = noted

    def _check_order(self) -> None:
        """Refuse a window in which ranks have added up gradients of different parameters. Collective.

        Raises:
            MisconfigurationException: with the first parameters that differ.
        """
        order, self._order = self._order, []
        parameters = list(self.parameters.values())
        self._used = {id(parameters[number]) for number in order}
        if comm.world_size() == 1:
            return
        found = hash(tuple(order))
        both = comm.all_reduce(torch.tensor([found, ~found]), "max")
        if int(both[0]) == ~int(both[1]):
            return
        names, orders = list(self.parameters), comm.all_gather_object(order)
        other = next(rank for rank, each in enumerate(orders) if each != orders[0])
        pairs = zip_longest(orders[0], orders[other])
        first = next(pair for pair in pairs if pair[0] != pair[1])
        zero, theirs = ("none more" if number is None else repr(names[number]) for number in first)
        raise MisconfigurationException(DIFFERENT.format(rank=other, theirs=theirs, zero=zero))

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a method of the module inside the engine's hooks."""
        if self.stage != 3:
            return self.engine(partial(fn, *args))
        # parameters that are gathered in inference mode could not be trained afterwards
        mode = nullcontext() if torch.is_grad_enabled() else _no_grad()
        with mode, lean_linear():
            return self.engine(partial(fn, *args))

    def backward(self, loss: Tensor, last: bool, drops: bool, own: Callable[..., Any] | None = None) -> None:
        """Backward of a micro-batch. Collective.

        Args:
            loss: it begins from.
            last: of its window.
            drops: it counts for nothing: its gradients are zero.
            own: the module's own, in place of ``loss.backward``.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        handles = [p.register_hook(torch.zeros_like) for p in self.parameters.values() if p.requires_grad and drops]
        try:
            with lean_linear() if self.stage == 3 else nullcontext():  # layers are recomputed as they were computed
                if own is None:
                    self.engine.backward(loss, scale_wrt_gas=False)
                else:
                    own(self.engine.scale(loss))
        finally:
            for handle in handles:
                handle.remove()
        if last:
            self._check_order()
        self.has_gradients = last

    def clip(self, limit: float) -> None:
        """Let the next step clip the whole gradient by its 2-norm."""
        self.zero.clip_grad = limit

    def step(self) -> None:
        """Update the parameters by the window's gradients. Collective."""
        self._take_settings()
        self.take_changes()
        try:
            if len(self._used) == len(self.parameters):
                self.engine.step()
            else:
                self._left_alone.step(self._used, self.engine.step)
                self._versions = self._versions_now()
        finally:
            self.zero.clip_grad = self._clips_by
        self.has_gradients = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks whether it came after a step

    def take_changes(self) -> None:
        """Let the engine have what was done to the module's parameters in place, as an optimizer alone would see it.

        In stage 3 a rank has no whole parameters, and those in 16 bits are rounded: there it is lost.
        """
        if self.stage != 3 and not self._rounds and self._versions != self._versions_now():
            self.zero.refresh_fp32_params()
            self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters.values()]

    def _take_settings(self) -> None:
        """Let the groups that step have the learning rates and the like of the user's."""
        for number, theirs in self._groups.items():  # loading a state makes the optimizer's groups anew
            mine = self.optimizer.param_groups[number]
            theirs.update({key: value for key, value in mine.items() if key != "params"})

    def untrained(self) -> str | None:
        """The name of a parameter of the optimizer that needs gradients by now, and that the engine does not know."""
        late = [
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in self._known
        ]
        names = {id(p): name for name, p in self.module.named_parameters()}
        return names.get(late[0], "") if late else None

    def zero_grad(self) -> None:
        """Drop what backwards have left."""
        self.has_gradients = False
        self._order.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.zero.zero_grad()
        if self.stage == 3:
            self.zero.grad_partitions_flat_buffer.zero_()  # it keeps those of parameters that nobody uses this time
        if self._offloads:
            for flat in self._flats:
                if flat.grad is not None:
                    flat.grad.zero_()
        if self.stage == 3:
            return
        self.zero.micro_step_id = -1
        for kept in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            for group in kept:
                kept[group] = None
        if self._offloads:
            self.zero.reset_cpu_buffers()

    def gradients(self) -> list[Tensor]:
        """This rank's parts of the window's gradients; changed in place, they count."""
        if not self.has_gradients:
            return []
        if self._offloads:
            return [flat.grad for flat in self._flats if flat.grad is not None]
        if self.stage == 3:
            return [self.zero.grad_partitions_flat_buffer]
        return [each for group in self.zero.averaged_gradients.values() if group is not None for each in group]

    def norms(self) -> list[Tensor]:
        """The norms of gradients that offloading has noted; changed in place, they count."""
        return list(getattr(self.zero, "norm_for_param_grads", {}).values())

    def save(self, folder: str | os.PathLike[str], tag: str, rest: dict[str, Any]) -> None:
        """Write the engine's own files into a folder. Collective.

        Args:
            folder: that all ranks see.
            tag: of the folder in it that has the files.
            rest: what goes with them.
        """
        self._take_settings()
        engine = vars(self.engine)
        door, engine["module"] = engine["module"], self.module  # whose names the files are to have
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=rest)
        finally:
            engine["module"] = door

    def end(self) -> None:
        """Take the engine's hooks away. Weights and optimizer states stay, and can be saved."""
        self.engine.destroy()
        self.has_gradients = False

    # -- what it holds

    def part(self, parameter: Any, of: Callable[[Tensor], Tensor] = lambda flat: flat) -> FlatPart:
        """What this rank has of a trained parameter, or of a state of the optimizer's that has its shape.

        Args:
            parameter: of the module.
            of: gives, for the engine's float32 tensor in which the parameter lies, the one to look at.
        """
        shape, even = getattr(parameter, "ds_shape", parameter.shape), self.stage == 3
        piece = self.pieces.get(id(parameter))
        if piece is None:
            return FlatPart(shape, 0, torch.empty(0, device=self._device), even)
        return FlatPart(shape, piece.start, piece.of(of(piece.flat)), even)

    def knows(self, parameter: Parameter) -> bool:
        """Whether it trains this parameter."""
        return id(parameter) in self._known

    def whole_gradient(self, parameter: Parameter) -> Tensor | None:
        """Its gradient over all ranks, between a window's last backward and the step. Collective."""
        from deepspeed.utils import safe_get_full_grad

        if not self.has_gradients or id(parameter) not in self._known:
            return None
        found: Tensor | None = safe_get_full_grad(parameter)
        return found

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    def optimizer_state(self, finish: Callable[[FlatPart], Tensor]) -> dict[str, Any]:
        """The optimizer's ordinary state dict. Collective.

        Args:
            finish: what becomes of this rank's part of a state.
        """
        made = self.optimizer.state_dict()
        trained = {number: p for number, p in self._numbered(made) if id(p) in self._known}
        mine = {number: self._kinds(parameter) for number, parameter in trained.items()}
        every = comm.all_gather_object(mine)
        states: dict[int, dict[str, Any]] = {}
        for number, parameter in trained.items():
            nothing: tuple[list[str], dict[str, Any]] = ([], {})
            flat, plain = next((each[number] for each in every if any(each[number])), nothing)
            state = {key: finish(self.part(parameter, partial(self._entry, key))) for key in flat}
            if state or plain:  # each with tensors of its own: optimizers count in place
                states[number] = {**{k: v.clone() if isinstance(v, Tensor) else v for k, v in plain.items()}, **state}
        return {**made, "state": states}

    def _numbered(self, state: Mapping[str, Any]) -> Iterator[tuple[int, Parameter]]:
        """The parameters of the user's optimizer with the numbers that a state dict gives them."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return zip(numbers, parameters, strict=True)

    def names(self) -> dict[int, str]:
        """The names of the parameters that are trained, by their numbers in the optimizer's state dict."""
        by_id = {id(p): name for name, p in self.parameters.items()}
        state = {"param_groups": self.optimizer.state_dict()["param_groups"]}
        return {number: by_id[id(p)] for number, p in self._numbered(state) if id(p) in by_id}

    def _kinds(self, parameter: Parameter) -> tuple[list[str], dict[str, Any]]:
        """Of a parameter's state on this rank: what has an entry for each element, and the rest."""
        piece = self.pieces.get(id(parameter))
        state = {} if piece is None else self._stepping.state.get(piece.flat, {})
        flat = [key for key, value in state.items() if piece is not None and _is_flat(value, piece)]
        return flat, {key: value for key, value in state.items() if key not in flat}

    def _entry(self, key: str, flat: Tensor) -> Tensor:
        found: Tensor = self._stepping.state[flat][key].detach()
        return found

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's parts of an ordinary state dict; a tensor without memory leaves what there is.

        Collective where it is in parts.
        """
        self.optimizer.load_state_dict({**saved, "state": {}})
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for number, parameter in self._numbered(saved):
            for key, value in saved["state"].get(number, {}).items():
                self._take_state(states, parameter, key, value)
        for flat, found in states.items():
            self._stepping.state[flat].update(found)
        if self.stage != 3 and states:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _take_state(self, states: dict[Tensor, dict[str, Any]], parameter: Parameter, key: str, value: object) -> None:
        """Take this rank's part of one value of a parameter's state into those of flat tensors."""
        shape, part = getattr(parameter, "ds_shape", parameter.shape), None
        if isinstance(value, Tensor) and value.is_meta:
            return
        if isinstance(value, Tensor) and value.shape == shape and key != "step":
            part = self._cut(parameter, value)  # on all ranks: a tensor in parts is put together
        piece = self.pieces.get(id(parameter))
        if piece is None:
            return
        if part is not None:
            flat = states[piece.flat].setdefault(key, torch.zeros_like(piece.flat, requires_grad=False))
            piece.of(flat).copy_(part)
        else:
            states[piece.flat][key] = value.clone() if isinstance(value, Tensor) else value

    def _cut(self, parameter: Parameter, value: Tensor) -> Tensor | None:
        """What this rank needs of a whole tensor, or of one in parts."""
        piece = self.pieces.get(id(parameter))
        if isinstance(value, FlatPart):
            if value.even and self.stage == 3:
                return value.to_local()
            value = value.whole(self._device)
        return None if piece is None else piece.cut(value)

    def load_parameter(self, parameter: Any, value: Tensor) -> None:
        """Let a parameter have this value, in float32 and in the module. Collective where it is in parts."""
        part, piece = self._cut(parameter, value), self.pieces.get(id(parameter))
        with torch.no_grad():
            if piece is not None and part is not None:
                piece.of(piece.flat).copy_(part)

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors of this rank by kind, as in `lockstep.memory.meter.KINDS`, beside the module's own parameters."""
        zero = self.zero
        states = list(tensors_in([dict(state) for state in self._stepping.state.values()], 4))
        buckets = [getattr(bucket, "buffer", []) for bucket in zero.ipg_buckets.values()]
        found = {"buckets": list(tensors_in(buckets, 3))}
        if self.stage == 3:
            found["parameters"] = [p.ds_tensor for p in self.module.parameters()]  # type: ignore[attr-defined]
            found["gathered"] = [p.data for p in self.module.parameters() if p.data.numel()]
            found["gradients"] = [zero.grad_partitions_flat_buffer]
            found["optimizer_states"] = [*self._flats, *states]
            return found
        kept = [*zero.averaged_gradients.values(), *zero.all_grad_tensors.values()]
        found["gradients"] = list(tensors_in([list(group) for group in kept if group is not None], 3))
        found["gradients"] += [flat.grad for flat in self._flats if flat.grad is not None]
        found["parameters"] = list(zero.bit16_groups_flat)
        found["optimizer_states"] = [*self._flats, *states]
        return found


def _is_flat(value: object, piece: Piece) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.flat.shape and value.dim() == 1


def _copy_of(optimizer: Optimizer) -> tuple[Optimizer, dict[int, dict[str, Any]]]:
    """An optimizer like the given one, of the trained parameters; and its groups by the number of the given one's."""
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update({key: value for key, value in vars(optimizer).items() if key not in ("step", "zero_grad")})
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        trained = [p for p in group["params"] if p.requires_grad]
        if trained:
            groups[number] = {**group, "params": trained}
    made.param_groups = list(groups.values())
    made.state = defaultdict(dict)
    return made, groups


@contextmanager
def _no_grad() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _values_alike() -> Iterator[None]:
    """Inside, the engine takes no weights of rank 0's: that is done, and it cannot send those of no dimensions."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda self: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = own


@contextmanager
def _adagrad_as_it_is() -> Iterator[None]:
    """Inside, the engine makes no Adagrad of its own, which would have one parameter group."""
    own = torch.optim.Adagrad
    torch.optim.Adagrad = type("Adagrad", (), {})  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.optim.Adagrad = own  # type: ignore[misc]


def evaluation(module: nn.Module, config: Mapping[str, Any]) -> Callable[..., Any]:
    """What calls a method of a module in partitions that nobody trains, with layers gathered. Collective."""
    import deepspeed

    align_numbers()
    engine: Any = deepspeed.initialize(model=Door(module), config=dict(config))[0]

    def run(fn: Callable[..., Any], *args: object) -> Any:
        with _no_grad(), lean_linear():
            return engine(partial(fn, *args))

    run.end = engine.destroy  # type: ignore[attr-defined]
    return run
