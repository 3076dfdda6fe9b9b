"""DeepSpeed's engine around a module and its optimizer: one window after the other, and what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.ground import comm
from lockstep.ground.tree import tensors_in
from lockstep.parallel.deepspeed.partition import align_numbers, is_partitioned, lean_linear, span


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
        self._stepping = self._inner  # DeepSpeed makes an Adagrad anew
        door = Door(module)
        rounds = any(config.get(block, {}).get("enabled") for block in ("bf16", "fp16"))
        before = {id(p): p.data for p in module.parameters() if rounds and not is_partitioned(p)}
        align_numbers()
        with _values_alike():
            self.engine: Any = deepspeed.initialize(model=door, optimizer=self._inner, config=dict(config))[0]
        self.zero: Any = self.engine.optimizer
        self._stepping = self.zero.optimizer
        names = self.engine.param_names
        for parameter in names:
            names[parameter] = names[parameter].removeprefix("module.")
        self.stage = int(self.engine.zero_optimization_stage())
        self._clips_by = float(self.engine.gradient_clipping())
        self.has_gradients = False
        self.parameters: dict[str, Parameter] = {
            name: p for name, p in module.named_parameters() if id(p) in self._trained()
        }
        self.pieces = {id(p): piece for p in self._trained().values() for piece in [self._piece(p)] if piece}
        self._offloads = bool(getattr(self.zero, "offload_optimizer", getattr(self.zero, "cpu_offload", False)))
        self._take_exact(before, exact)

    def _trained(self) -> dict[int, Parameter]:
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return {id(p): p for group in groups for p in group}

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
            if own is None:
                self.engine.backward(loss, scale_wrt_gas=False)
            else:
                own(self.engine.scale(loss))
        finally:
            for handle in handles:
                handle.remove()
        self.has_gradients = last

    def clip(self, limit: float) -> None:
        """Let the next step clip the whole gradient by its 2-norm."""
        self.zero.clip_grad = limit

    def step(self) -> None:
        """Update the parameters by the window's gradients. Collective."""
        for number, theirs in self._groups.items():  # loading a state makes the optimizer's groups anew
            mine = self.optimizer.param_groups[number]
            theirs.update({key: value for key, value in mine.items() if key != "params"})
        try:
            self.engine.step()
        finally:
            self.zero.clip_grad = self._clips_by
        self.has_gradients = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks whether it came after a step

    def untrained(self) -> str | None:
        """The name of a parameter of the optimizer that needs gradients by now, and that the engine does not know."""
        known = self._ids()
        late = [
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in known
        ]
        names = {id(p): name for name, p in self.module.named_parameters()}
        return names.get(late[0], "") if late else None

    def zero_grad(self) -> None:
        """Drop what backwards have left."""
        self.has_gradients = False
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

    def scale_gradients(self, factor: float) -> None:
        """Multiply the window's gradients."""
        for gradient in self.gradients():
            gradient.mul_(factor)
        norms = getattr(self.zero, "norm_for_param_grads", {})
        for key in norms:
            norms[key] = norms[key] * factor

    def gradients(self) -> list[Tensor]:
        """This rank's parts of the window's gradients; changed in place, they count."""
        if not self.has_gradients:
            return []
        if self._offloads:
            return [flat.grad for flat in self._flats if flat.grad is not None]
        if self.stage == 3:
            return [self.zero.grad_partitions_flat_buffer]
        return [each for group in self.zero.averaged_gradients.values() if group is not None for each in group]

    def end(self) -> None:
        """Take the engine's hooks away. Weights and optimizer states stay, and can be saved."""
        self.engine.destroy()
        self.has_gradients = False

    # -- what it holds

    def whole(self, parameter: Any) -> Tensor:
        """A parameter's value in float32 (a frozen one's as it is), whole, on its device. Collective."""
        if id(parameter) not in self._ids():
            return whole_value(parameter)
        return self._joined(parameter, lambda flat: flat)

    def _ids(self) -> set[int]:
        return {id(p) for p in self.parameters.values()}

    def whole_gradient(self, parameter: Parameter) -> Tensor | None:
        """Its gradient over all ranks, between a window's last backward and the step. Collective."""
        from deepspeed.utils import safe_get_full_grad

        if not self.has_gradients or id(parameter) not in self._ids():
            return None
        found: Tensor | None = safe_get_full_grad(parameter)
        return found

    def _joined(self, parameter: Any, of: Callable[[Tensor], Tensor | None]) -> Tensor:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=self._device)
        piece = self.pieces.get(id(parameter))
        found = None if piece is None else of(piece.flat)
        if piece is not None and found is not None:
            whole[piece.start : piece.start + piece.size] = piece.of(found.detach()).to(self._device, torch.float32)
        return comm.all_reduce(whole, "sum").view(shape)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    def optimizer_state(self, keep: bool) -> dict[str, Any]:
        """The optimizer's ordinary state dict, as of one process. Collective.

        Args:
            keep: whether this rank gets tensors; else one without memory stands for each.
        """
        made = self.optimizer.state_dict()
        numbers = [number for group in made["param_groups"] for number in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = self._ids()
        states = {}
        for number, parameter in zip(numbers, parameters, strict=True):
            if id(parameter) in known:
                state = self._state_of(parameter, keep)
                if state:
                    states[number] = state
        return {**made, "state": states}

    def _state_of(self, parameter: Parameter, keep: bool) -> dict[str, Any]:
        piece = self.pieces.get(id(parameter))
        mine = {} if piece is None else self._stepping.state.get(piece.flat, {})
        kinds = {key: _is_flat(value, piece) for key, value in mine.items()} if piece is not None else {}
        every = comm.all_gather_object((kinds, {key: mine[key] for key, flat in kinds.items() if not flat}))
        kinds, plain = next((found for found in every if found[0]), ({}, {}))
        state: dict[str, Any] = {}
        for key, flat in kinds.items():
            if not flat:
                state[key] = plain[key]
                continue
            whole = self._joined(parameter, partial(self._entry, key))
            state[key] = whole.cpu() if keep else torch.empty_like(whole, device="meta")
        return state

    def _entry(self, key: str, flat: Tensor) -> Tensor | None:
        found: Tensor | None = self._stepping.state[flat].get(key)
        return found

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's parts of an ordinary state dict; a tensor without memory leaves what there is."""
        self.optimizer.load_state_dict({**saved, "state": {}})
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for number, parameter in zip(numbers, parameters, strict=True):
            piece, state = self.pieces.get(id(parameter)), saved["state"].get(number, {})
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if piece is None:
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_meta:
                    continue
                if isinstance(value, Tensor) and value.shape == shape and key != "step":
                    flat = states[piece.flat].setdefault(key, torch.zeros_like(piece.flat, requires_grad=False))
                    piece.of(flat).copy_(piece.cut(value))
                else:
                    states[piece.flat][key] = value.clone() if isinstance(value, Tensor) else value
        for flat, found in states.items():
            self._stepping.state[flat].update(found)
        if self.stage != 3 and states:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def load_parameter(self, parameter: Any, value: Tensor) -> None:
        """Let a parameter have this value, in float32 and in the module; no other rank is asked."""
        piece = self.pieces.get(id(parameter))
        with torch.no_grad():
            if piece is not None:
                piece.of(piece.flat).copy_(piece.cut(value))

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors of this rank by kind, as in `lockstep.parallel.memory.KINDS`, beside the module's own parameters."""
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


def whole_value(parameter: Any) -> Tensor:
    """A parameter's value as the module has it, whole. Collective where it is partitioned."""
    from lockstep.parallel.deepspeed.partition import gathered

    if not is_partitioned(parameter):
        value: Tensor = parameter.detach()
        return value
    with gathered([parameter]):
        copy: Tensor = parameter.detach().clone()
    return copy


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
