"""Wrapper around DeepSpeed's engine, with backward, clipping, optimizer steps, and states for checkpoints."""

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
from lockstep.engines.engine import Gradients
from lockstep.extensions.deepspeed.partition import align_numbers, lean_linear, span
from lockstep.extensions.deepspeed.unused import UnusedParameters
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import is_partitioned
from lockstep.ground.tree import tensors_in

DIFFERENT = (
    "DeepSpeed reduces gradients in the order of the backward, and the ranks' orders differ: rank {rank} has {theirs} "
    "where rank 0 has {zero}. Use the same parameters in the same order on all ranks in each micro-batch, or use "
    'strategy="ddp" or "fsdp", which have no such limit.'
)


MIDDLE = (
    "DeepSpeedStrategy: a checkpoint within an accumulation window cannot be saved: it does not contain the gradients "
    "of the window's first micro-batches. Save at the end of a window: make `val_check_interval` and "
    "`every_n_train_steps` multiples of accumulate_grad_batches."
)


class AnyCall(nn.Module):
    """Module whose forward calls a given function, so that DeepSpeed's hooks run around any of the user's methods.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Any]) -> Any:
        """Call ``work``, and return the result."""
        return work()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the user's module."""
        return self.module.load_state_dict(*args, **kwargs)


@dataclass(frozen=True)
class Piece:
    """Location of this rank's shard of a parameter, i.e. of the elements that this rank updates.

    Attributes:
        flat: the engine's 1-D float32 tensor that contains the shard; a parameter of the optimizer that steps.
        place: index of the shard's first element in ``flat``.
        start: index of the shard's first element in the flattened parameter.
        size: number of elements.
    """

    flat: Tensor
    place: int
    start: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the shard's elements in ``tensor``, which has the same length as ``flat``."""
        return tensor.narrow(0, self.place, self.size)

    def cut(self, whole: Tensor) -> Tensor:
        """Return the shard's elements of the full tensor ``whole``, as a 1-D tensor."""
        return whole.flatten()[self.start : self.start + self.size]


class ZeroEngine:
    """Wrapper around DeepSpeed's engine that trains a module with ZeRO stage 1, 2 or 3. Constructing it is collective.

    The user's optimizer and its parameters do not change. The engine steps a copy of it, whose parameters are this
    rank's float32 partitions; learning rates and other settings are copied before each step.

    Args:
        module: the user's module on its device; partitioned for stage 3.
        optimizer: the user's optimizer.
        config: the engine's config, with ``gradient_accumulation_steps`` 1.
        exact: values of this rank's elements in a higher precision than the module's, by the parameter's id.

    Attributes:
        engine: DeepSpeed's engine.
        stage: ZeRO's stage.
        pieces: this rank's shard of each parameter, by the parameter's id; parameters without one are missing.
        has_gradients: True if a window's gradients are complete and not yet used.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], exact: Mapping[int, Tensor]
    ) -> None:
        import deepspeed

        self.module, self.optimizer = module, optimizer
        self._inner, self._groups = _copy_optimizer(optimizer)
        outer = AnyCall(module)
        # the engine rounds the module to 16 bits when it is made, and then copies its float32 weights from there
        rounds = any(config.get(block, {}).get("enabled") for block in ("bf16", "fp16"))
        before = {id(p): p.data for p in module.parameters() if rounds and not is_partitioned(p)}
        align_numbers()
        with _without_own_choices():
            self.engine: Any = deepspeed.initialize(model=outer, optimizer=self._inner, config=dict(config))[0]
        self.zero: Any = self.engine.optimizer
        self._stepping = self.zero.optimizer
        # the engine's files have these names, and they are to be those of the user's module, not of `AnyCall`
        names = self.engine.param_names
        for parameter in names:
            names[parameter] = names[parameter].removeprefix("module.")
        for group in getattr(self.zero, "_param_slice_mappings", ()):
            for name in list(group):
                group[name.removeprefix("module.")] = group.pop(name)
        self.stage = int(self.engine.zero_optimization_stage())
        self._clips_by = float(self.engine.gradient_clipping())
        self.has_gradients = False
        trained = {id(p): p for group in self._trained_groups for p in group}
        self.parameters: dict[str, Parameter] = {name: p for name, p in module.named_parameters() if id(p) in trained}
        self._trained_ids = {id(p) for p in self.parameters.values()}
        self.pieces = {id(p): piece for p in trained.values() for piece in [self._piece(p)] if piece}
        self._offloads = bool(getattr(self.zero, "offload_optimizer", getattr(self.zero, "cpu_offload", False)))
        self._rounds = rounds
        self._versions = self._versions_now()
        known = {id(p): name for name, p in self.parameters.items()}
        swaps = bool(getattr(self.zero, "swap_optimizer", False))
        self._unused = UnusedParameters(self._stepping, self._flats, self._trained_groups, self.pieces, known, swaps)
        # the engine took its float32 weights from the rounded module; set them to the values before rounding
        with torch.no_grad():
            for key, piece in self.pieces.items():
                if key in exact:
                    whole = exact[key].numel() != piece.size
                    piece.of(piece.flat).copy_(piece.cut(exact[key]) if whole else exact[key])
                elif key in before:
                    piece.of(piece.flat).copy_(piece.cut(before[key]))
        self._used: set[int] = set()  # ids of parameters with a gradient in the window
        self._order: list[int] = []  # numbers of the window's parameters, in the order of the engine's buckets
        self._record_order()
        # Adagrad has states from its construction, and the user may have loaded others
        if optimizer.state:
            self.load_optimizer_state(optimizer.state_dict())

    @property
    def _trained_groups(self) -> list[list[Parameter]]:
        groups: list[list[Parameter]] = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return groups

    @property
    def _flats(self) -> list[Tensor]:
        """Flat float32 tensors that the engine's optimizer updates."""
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

    def _record_order(self) -> None:
        """Make the engine record the order in which gradients enter its buckets, for `_check_order`."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters.values())}
        put = self.zero.reduce_independent_p_g_buckets_and_remove_grads

        # the engine adds gradients that have the same position in the ranks' buckets
        def record(parameter: Parameter, *args: Any) -> None:
            self._order.append(numbers[id(parameter)])
            put(parameter, *args)

        self.zero.reduce_independent_p_g_buckets_and_remove_grads = record

    def _check_order(self) -> None:
        """Raise an error if the ranks' buckets received different gradients, or in different orders. Collective.

        Raises:
            MisconfigurationException: the orders differ; the message names the first parameters that do.
        """
        order, self._order = self._order, []
        parameters = list(self.parameters.values())
        self._used = {id(parameters[number]) for number in order}
        if comm.world_size() == 1:
            return
        # one collective of two numbers: the largest hash and the smallest (by its complement) are equal if all are
        found = hash(tuple(order))
        both = comm.all_reduce(torch.tensor([found, ~found]), "max")
        if int(both[0]) == ~int(both[1]):
            return
        names, orders = list(self.parameters), comm.all_gather_object(order)
        other = next(rank for rank, each in enumerate(orders) if each != orders[0])
        pairs = zip_longest(orders[0], orders[other])
        first = next(pair for pair in pairs if pair[0] != pair[1])
        zero, theirs = ("no further parameter" if number is None else repr(names[number]) for number in first)
        raise MisconfigurationException(DIFFERENT.format(rank=other, theirs=theirs, zero=zero))

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call the method ``fn`` of the module so that the engine's hooks run around the call."""
        if self.stage != 3:
            return self.engine(partial(fn, *args))
        # parameters that are gathered in inference mode could not be trained afterwards
        mode = nullcontext() if torch.is_grad_enabled() else _no_grad()
        with mode, lean_linear():
            return self.engine(partial(fn, *args))

    def backward(self, loss: Tensor, last: bool, drops: bool, own: Callable[..., Any] | None = None) -> None:
        """Run the backward of a micro-batch. Collective.

        Args:
            loss: the micro-batch's loss.
            last: True if this is the last micro-batch of its accumulation window.
            drops: True if the micro-batch does not count, so that its gradients are set to zero.
            own: the module's override of ``backward``, to be called instead of ``loss.backward``.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # a rank without samples still takes part in the engine's collectives, with zeros
        handles = [p.register_hook(torch.zeros_like) for p in self.parameters.values() if p.requires_grad and drops]
        try:
            # activation checkpointing runs forwards here, which must save as many tensors as the first time
            with lean_linear() if self.stage == 3 else nullcontext():
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
        """Make the next step clip the full gradient to a 2-norm of at most ``limit``."""
        self.zero.clip_grad = limit

    def step(self) -> None:
        """Update the parameters with the gradients of the accumulation window. Collective."""
        self._copy_settings()
        self.copy_changes()
        try:
            if len(self._used) == len(self.parameters):
                self.engine.step()
            else:
                self._unused.step(self._used, self.engine.step)
                self._versions = self._versions_now()
        finally:
            self.zero.clip_grad = self._clips_by
        self.has_gradients = False
        # torch's schedulers warn if the optimizer has not stepped before them
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def copy_changes(self) -> None:
        """Copy the module's parameters into the engine's float32 weights if they were changed in place.

        Changes are lost in stage 3, where a rank has no whole parameters, and with parameters in 16 bits, which are
        rounded.
        """
        if self.stage != 3 and not self._rounds and self._versions != self._versions_now():
            self.zero.refresh_fp32_params()
            self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.parameters.values()]

    def _copy_settings(self) -> None:
        """Copy learning rates and other settings from the user's parameter groups to the engine's."""
        # by number, since `load_state_dict` replaces the dicts of the user's groups
        for number, theirs in self._groups.items():
            mine = self.optimizer.param_groups[number]
            theirs.update({key: value for key, value in mine.items() if key != "params"})

    def find_untrained(self) -> str | None:
        """Return the name of a parameter that was unfrozen, or added to the optimizer, after this engine was created.

        "" if the parameter is not the module's, None if there is no such parameter.
        """
        late = [
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and id(p) not in self._trained_ids
        ]
        names = {id(p): name for name, p in self.module.named_parameters()}
        return names.get(late[0], "") if late else None

    def zero_grad(self) -> None:
        """Drop all gradients, including the gradients of an unfinished accumulation window."""
        self.has_gradients = False
        self._order.clear()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.zero.zero_grad()
        # the engine only overwrites the gradients of parameters that the next window uses
        if self.stage == 3:
            self.zero.grad_partitions_flat_buffer.zero_()
        if self._offloads:
            for flat in self._flats:
                if flat.grad is not None:
                    flat.grad.zero_()
        if self.stage == 3:
            return
        # the engine resets these only in its own step, which a window that is dropped does not reach
        self.zero.micro_step_id = -1
        for kept in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            for group in kept:
                kept[group] = None
        if self._offloads:
            self.zero.reset_cpu_buffers()

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the window's gradients. In-place changes of the shards affect the step."""
        if not self.has_gradients:
            return []
        if self._offloads:
            return [flat.grad for flat in self._flats if flat.grad is not None]
        if self.stage == 3:
            return [self.zero.grad_partitions_flat_buffer]
        return [each for group in self.zero.averaged_gradients.values() if group is not None for each in group]

    def norms(self) -> list[Tensor]:
        """Return the gradient norms recorded under optimizer offload. In-place changes of the norms affect clipping."""
        return list(getattr(self.zero, "norm_for_param_grads", {}).values())

    def save(self, folder: str | os.PathLike[str], tag: str, rest: dict[str, Any]) -> None:
        """Write the engine's own files into a folder. Collective.

        Args:
            folder: folder on a file system that all ranks share.
            tag: name of the inner folder with the files.
            rest: further entries of the checkpoint (the engine's ``client_state``).
        """
        self._copy_settings()
        engine = vars(self.engine)
        # the files have the names of the user's module, without those of `AnyCall`
        outer, engine["module"] = engine["module"], self.module
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=rest)
        finally:
            engine["module"] = outer

    def end(self) -> None:
        """Remove the engine's hooks. Weights and optimizer states stay and can be saved."""
        self.engine.destroy()
        self.has_gradients = False

    # -- states

    def part(self, parameter: Any, of: Callable[[Tensor], Tensor] = lambda flat: flat) -> FlatPart:
        """Return this rank's shard of a trained parameter, or of an optimizer state with the parameter's shape.

        Args:
            parameter: a trained parameter of the module.
            of: maps the engine's float32 tensor that contains the parameter to the tensor to be cut. Default: the
                weights themselves.
        """
        shape, even = getattr(parameter, "ds_shape", parameter.shape), self.stage == 3
        piece = self.pieces.get(id(parameter))
        if piece is None:
            return FlatPart(shape, 0, torch.empty(0, device=self._device), even)
        return FlatPart(shape, piece.start, piece.of(of(piece.flat)), even)

    def trains(self, parameter: Parameter) -> bool:
        """Return True if the engine trains this parameter."""
        return id(parameter) in self._trained_ids

    def whole_gradient(self, parameter: Parameter) -> Tensor | None:
        """Return a parameter's full gradient, averaged over the ranks. Collective.

        The gradient exists between a window's last backward and the step; otherwise the result is None.
        """
        from deepspeed.utils import safe_get_full_grad

        if not self.has_gradients or id(parameter) not in self._trained_ids:
            return None
        found: Tensor | None = safe_get_full_grad(parameter)
        return found

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.engine.device
        return device

    def optimizer_state(self, finish: Callable[[FlatPart], Tensor]) -> dict[str, Any]:
        """Return the state dict that the user's optimizer would have in one process. Collective.

        Args:
            finish: converts this rank's shard of a state to the value in the dict.
        """
        made = self.optimizer.state_dict()
        trained = {number: p for number, p in self._numbered(made) if id(p) in self._trained_ids}
        mine: dict[int, tuple[list[str], dict[str, Any]]] = {}
        for number, parameter in trained.items():
            piece = self.pieces.get(id(parameter))
            if piece is None:
                mine[number] = [], {}
                continue
            own = self._stepping.state.get(piece.flat, {})
            # states with a value per element have the flat tensor's shape; the others are the group's, such as `step`
            shape = piece.flat.shape
            kinds = [key for key, value in own.items() if isinstance(value, Tensor) and value.shape == shape]
            mine[number] = kinds, {key: value for key, value in own.items() if key not in kinds}
        # a rank without a shard of a parameter does not have its states, but the dicts of all ranks are equal
        every = comm.all_gather_object(mine)
        states: dict[int, dict[str, Any]] = {}
        for number, parameter in trained.items():
            nothing: tuple[list[str], dict[str, Any]] = ([], {})
            flat, plain = next((each[number] for each in every if any(each[number])), nothing)
            state = {key: finish(self.part(parameter, partial(self._entry, key))) for key in flat}
            # plain tensors are cloned for each parameter: optimizers increment `step` in place
            if state or plain:
                states[number] = {**{k: v.clone() if isinstance(v, Tensor) else v for k, v in plain.items()}, **state}
        return {**made, "state": states}

    def _numbered(self, state: Mapping[str, Any]) -> Iterator[tuple[int, Parameter]]:
        """Return pairs of a parameter's number in a state dict and the parameter of the user's optimizer."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return zip(numbers, parameters, strict=True)

    def names(self) -> dict[int, str]:
        """Return {number in the optimizer's state dict: name} for the trained parameters."""
        by_id = {id(p): name for name, p in self.parameters.items()}
        state = {"param_groups": self.optimizer.state_dict()["param_groups"]}
        return {number: by_id[id(p)] for number, p in self._numbered(state) if id(p) in by_id}

    def _entry(self, key: str, flat: Tensor) -> Tensor:
        found: Tensor = self._stepping.state[flat][key].detach()
        return found

    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's shards of optimizer states from a state dict. Tensors on the meta device are skipped.

        Collective if the saved tensors are shards.
        """
        # groups and settings go to the user's optimizer, states to the engine's
        self.optimizer.load_state_dict({**saved, "state": {}})
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for number, parameter in self._numbered(saved):
            shape, piece = getattr(parameter, "ds_shape", parameter.shape), self.pieces.get(id(parameter))
            for key, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_meta:
                    continue
                part = None
                if isinstance(value, Tensor) and value.shape == shape and key != "step":
                    # on all ranks, also those without a shard: gathering saved shards is collective
                    part = self._cut(parameter, value)
                if piece is None:
                    continue
                if part is not None:
                    zeros = torch.zeros_like(piece.flat, requires_grad=False)
                    piece.of(states[piece.flat].setdefault(key, zeros)).copy_(part)
                else:
                    states[piece.flat][key] = value.clone() if isinstance(value, Tensor) else value
        for flat, found in states.items():
            self._stepping.state[flat].update(found)
        # the engine links parameters to their states for `safe_get_full_optimizer_state`; the old ones are replaced
        if self.stage != 3 and states:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _cut(self, parameter: Parameter, value: Tensor) -> Tensor | None:
        """Return this rank's elements of ``value``, a full tensor or a saved shard; None if the rank has no shard."""
        piece = self.pieces.get(id(parameter))
        if isinstance(value, FlatPart):
            if value.even and self.stage == 3:
                return value.to_local()
            value = value.whole(self._device)
        return None if piece is None else piece.cut(value)

    def load_parameter(self, parameter: Any, value: Tensor) -> None:
        """Copy ``value`` into the engine's float32 weights of a parameter. Collective if ``value`` is a saved shard."""
        part, piece = self._cut(parameter, value), self.pieces.get(id(parameter))
        with torch.no_grad():
            if piece is not None and part is not None:
                piece.of(piece.flat).copy_(part)

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by kind (`lockstep.memory.meter.KINDS`)."""
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


class ZeroGradients(Gradients[ZeroEngine]):
    """Access to the gradients in DeepSpeed's engine, which leaves the ``.grad`` of parameters empty."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """Return this rank's shards of the gradients, and the gradient norms recorded under optimizer offload."""
        return [*self.holder.gradients(), *self.holder.norms()]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Fill ``.grad`` with full gradients within the context. Changes of these gradients are lost. Collective."""
        zero = self.holder
        if not zero.has_gradients:
            yield
            return
        for parameter in zero.parameters.values():
            gradient = zero.whole_gradient(parameter)
            if gradient is not None and gradient.shape == parameter.shape:
                parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in zero.parameters.values():
                parameter.grad = None

    def window_state(self) -> dict[str, Any]:
        """Raise an error, since a checkpoint cannot contain the gradients of an unfinished window."""
        raise MisconfigurationException(MIDDLE)


def _copy_optimizer(optimizer: Optimizer) -> tuple[Optimizer, dict[int, dict[str, Any]]]:
    """Copy an optimizer with only those parameters that require gradients.

    Returns:
        the copy, and its groups by the index of the original group.
    """
    # without `__init__`: a user's class may take any arguments
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
def _without_own_choices() -> Iterator[None]:
    """Within the block, prevent DeepSpeed from broadcasting weights and replacing Adagrad when it creates an engine."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    broadcast, adagrad = DeepSpeedEngine._broadcast_model, torch.optim.Adagrad
    # the strategy has broadcast rank 0's weights, and the engine fails on parameters without dimensions
    DeepSpeedEngine._broadcast_model = lambda self: None
    # the engine replaces Adagrad by its own one, which has one parameter group
    torch.optim.Adagrad = type("Adagrad", (), {})  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast
        torch.optim.Adagrad = adagrad  # type: ignore[misc]


def evaluation(module: nn.Module, config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function for evaluation that calls methods of a partitioned module. Collective.

    Layers are gathered for the call. The function's attribute ``end`` removes the hooks.
    """
    import deepspeed

    align_numbers()
    engine: Any = deepspeed.initialize(model=AnyCall(module), config=dict(config))[0]

    def run(fn: Callable[..., Any], *args: object) -> Any:
        with _no_grad(), lean_linear():
            return engine(partial(fn, *args))

    run.end = engine.destroy  # type: ignore[attr-defined]
    return run
