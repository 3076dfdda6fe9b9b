"""ModelPruning: sets elements of parameters to zero during training, with torch's pruning methods."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lockstep.callbacks.base import Callback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import refuse_lazy
from lockstep.ground.rank import rank_zero_info
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

# -- pruning methods -----------------------------------------------------------------------------------------


METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "ln_structured": (prune.ln_structured, prune.LnStructured),
    "l1_unstructured": (prune.l1_unstructured, prune.L1Unstructured),
    "random_structured": (prune.random_structured, prune.RandomStructured),
    "random_unstructured": (prune.random_unstructured, prune.RandomUnstructured),
}
"""Function and class of each pruning method in torch, by name."""


def find_method(
    pruning_fn: str | Callable[..., Any], is_global: bool, dim: int | None, norm: int | None
) -> tuple[Any, dict[str, Any]]:
    """Resolve ModelPruning's arguments to a pruning method, and to the method's keyword arguments.

    Args:
        pruning_fn: the ``pruning_fn`` of ModelPruning.
        is_global: the ``use_global_unstructured`` of ModelPruning.
        dim: the ``pruning_dim`` of ModelPruning.
        norm: the ``pruning_norm`` of ModelPruning.

    Returns:
        With ``is_global`` a class of pruning method, else a function ``fn(module, name=..., amount=...)``; and
        arguments by name.

    Raises:
        MisconfigurationException: the arguments are invalid or do not go together.
    """
    names = [name for name, (function, _) in METHODS.items() if pruning_fn is function]
    if names or isinstance(pruning_fn, str):
        return _method_by_name(names[0] if names else str(pruning_fn).lower(), is_global, dim, norm)
    is_method = inspect.isclass(pruning_fn) and issubclass(pruning_fn, prune.BasePruningMethod)
    if is_method:
        if not is_global:
            raise MisconfigurationException(
                f"ModelPruning(pruning_fn={pruning_fn.__name__}, use_global_unstructured=False): a class of pruning "
                "method works with use_global_unstructured=True only. To prune each parameter separately, use a "
                "function `fn(module, name=..., amount=...)`, such as the class's `apply`."
            )
        _check_type(cast("type[prune.BasePruningMethod]", pruning_fn))
    elif is_global or not callable(pruning_fn):
        hint = " (the class, not an instance)" if isinstance(pruning_fn, prune.BasePruningMethod) else ""
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={pruning_fn!r:.100}): pass a str in {list(METHODS)} or a class "
            f"derived from torch.nn.utils.prune.BasePruningMethod{hint}; with use_global_unstructured=False also a "
            "function `fn(module, name=..., amount=...)`."
        )
    return pruning_fn, {}


def _method_by_name(name: str, is_global: bool, dim: int | None, norm: int | None) -> tuple[Any, dict[str, Any]]:
    if name not in METHODS:
        raise MisconfigurationException(f"ModelPruning(pruning_fn={name!r}): pass one of {list(METHODS)}.")
    options: dict[str, Any] = {}
    if name.endswith("_structured"):
        if dim is None:
            raise MisconfigurationException(
                f"ModelPruning({name!r}): the `pruning_dim` should be provided, the dimension along which slices are "
                "removed."
            )
        options["dim"] = dim
    if name == "ln_structured":
        if norm is None:
            raise MisconfigurationException(f"ModelPruning({name!r}): the `pruning_norm` should be provided, e.g. 2.")
        options["n"] = norm
    function, method = METHODS[name]
    if is_global:
        _check_type(method)
        return method, options
    return partial(function, **options), {}


def _check_type(method: type[prune.BasePruningMethod]) -> None:
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind != "unstructured":
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={method.__name__}, use_global_unstructured=True): the method's PRUNING_TYPE is "
            f"{kind!r}, but across parameters only 'unstructured' methods work. Set use_global_unstructured=False."
        )


# -- the callback --------------------------------------------------------------------------------------------


CONTAINERS = (LightningModule, nn.Sequential, nn.ModuleList, nn.ModuleDict)
ParameterList = Sequence[tuple[nn.Module, str]]


class ModelPruning(Callback):
    """Callback that prunes parameters with ``torch.nn.utils.prune`` at the end of each epoch.

    A pruned parameter ``weight`` becomes ``weight_orig`` with a buffer ``weight_mask``; the layer uses their product.
    Masks accumulate: each time, ``amount`` of the remaining elements is pruned.

    Checkpoints contain the masks, and the initial values that ``use_lottery_ticket_hypothesis`` needs. A resumed fit
    continues bit for bit. All ranks use rank 0's masks and decisions. A parameter to prune must be read in the
    ``forward`` of the layer that owns it, as in all of torch's layers.

    Args:
        pruning_fn: the method: "l1_unstructured", "random_unstructured", "ln_structured", "random_structured"; a
            subclass of ``torch.nn.utils.prune.BasePruningMethod`` (the class); or, with
            ``use_global_unstructured=False``, a function ``fn(module, name=..., amount=...)``.
        parameters_to_prune: pairs ``(module, "weight")``; empty for all ``parameter_names`` of all layers.
        parameter_names: "weight", "bias", or both (the default).
        use_global_unstructured: compare the elements of all parameters with each other; False prunes each parameter
            separately.
        amount: fraction (float) or number (int) of elements to prune each time, or a function of the epoch that returns
            it; 0 prunes nothing.
        apply_pruning: whether to prune, or a function of the epoch that returns it.
        make_pruning_permanent: remove the masks when training ends, and save checkpoints without them. Pruned elements
            are zeros there.
        use_lottery_ticket_hypothesis: reset the remaining elements to their initial values after pruning; or a function
            of the epoch that returns whether to.
        resample_parameters: with ``use_lottery_ticket_hypothesis``, draw new initial values instead.
        pruning_dim: dimension along which structured pruning removes slices.
        pruning_norm: the n of "ln_structured".
        verbose: 1 logs the amount of pruned elements, 2 also for each parameter.
        prune_on_train_epoch_end: False prunes at the end of a fit's validations instead.

    Raises:
        MisconfigurationException: an argument is invalid, or the model does not have a parameter.

    Example::

        Trainer(callbacks=[ModelPruning("l1_unstructured", amount=0.2)])

    Source: Frankle and Carbin, The Lottery Ticket Hypothesis, ICLR 2019 (arXiv:1803.03635).
    """

    replaces_parameters = True

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: ParameterList = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        unknown = [name for name in parameter_names or () if name not in self.PARAMETER_NAMES]
        if unknown:
            raise MisconfigurationException(
                f"ModelPruning(parameter_names={parameter_names}): {unknown[0]} isn't in {self.PARAMETER_NAMES}. Use "
                "`parameters_to_prune` for other parameters."
            )
        if not (isinstance(amount, (int, float)) or callable(amount)):
            raise MisconfigurationException(
                f"ModelPruning(amount={amount!r}): pass an int, a float, or a function of the epoch."
            )
        if not callable(amount) and not 0 <= amount <= (1 if isinstance(amount, float) else math.inf):
            raise MisconfigurationException(
                f"ModelPruning(amount={amount!r}): a float is the fraction to prune, between 0 and 1, and an int the "
                "number of elements."
            )
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"ModelPruning(verbose={verbose!r}): pass 0, 1 or 2.")
        self._use_global_unstructured = use_global_unstructured
        self.pruning_fn, self._options = find_method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self.amount = amount
        self._requested: ParameterList = parameters_to_prune
        self._requested_names: list[str] = []
        self._parameters_to_prune: ParameterList = parameters_to_prune
        self._parameter_names = tuple(parameter_names or self.PARAMETER_NAMES)
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        # Callbacks with the same two settings have the same state, because masks belong to the model.
        self._shares_state = bool(use_lottery_ticket_hypothesis), resample_parameters
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._names: list[str] = []  # of the parameters to prune, in the model
        self._originals: dict[str, Tensor] = {}
        self._last_masks: dict[str, Tensor] = {}  # masks that were made permanent, for the last checkpoint
        self._loaded: dict[str, Any] | None = None
        self._handle: Any = None

    # -- the parameters to prune ---------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: ParameterList = ()) -> ParameterList:
        """Return the pairs ``(module, name)`` to prune; by default all of ``parameters_to_prune``.

        Override this method to select some of them.
        """
        return parameters_to_prune

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: nn.Module, parameters_to_prune: ParameterList = (), parameter_names: Sequence[str] = ()
    ) -> ParameterList:
        """Return the pairs ``(module, name)`` to prune: the given pairs, or by default those of all layers.

        Args:
            pl_module: module with the layers.
            parameters_to_prune: pairs ``(module, name)``; empty for those of all layers.
            parameter_names: names of parameters to prune if ``parameters_to_prune`` is empty; default: "weight" and
                "bias".

        Raises:
            MisconfigurationException: an entry is not a pair ``(module, name)``, or is not in the model.
        """
        modules = [module for module in pl_module.modules() if not isinstance(module, CONTAINERS)]
        if not parameters_to_prune:
            names = parameter_names or ModelPruning.PARAMETER_NAMES
            return [(module, name) for name in names for module in modules if _has_parameter(module, name)]
        if not isinstance(parameters_to_prune, (list, tuple)) or not all(map(_is_pair, parameters_to_prune)):
            raise MisconfigurationException(
                f"ModelPruning(parameters_to_prune={parameters_to_prune!r:.200}): pass a list of tuples with 2 "
                "elements, (nn.Module, name of the parameter)."
            )
        _refuse_missing(modules, parameters_to_prune)
        return parameters_to_prune

    # -- hooks ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the parameters to prune; save their initial values if ``use_lottery_ticket_hypothesis`` needs them.

        Raises:
            MisconfigurationException: the strategy shards parameters, or a parameter to prune is missing or lazy.
        """
        # After unpickling in another process, the pairs refer to modules of that process.
        if self._requested_names and not {id(part) for part, _ in self._requested} <= set(map(id, pl_module.modules())):
            self._requested = _by_name(pl_module, self._requested_names)
        if trainer.strategy.cuts_parameters:
            raise MisconfigurationException(
                f"ModelPruning does not work with {type(trainer.strategy).__name__}, because each rank would prune its "
                'shard of a parameter separately. Use strategy="ddp".'
            )
        refuse_lazy(pl_module, "ModelPruning")
        found = self.sanitize_parameters_to_prune(pl_module, self._requested, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(found)
        self._names = _names_of(pl_module, self._parameters_to_prune)
        self._requested_names = _names_of(pl_module, self._requested)
        self._loaded = None
        if stage == "fit":
            self._last_masks = {}
            self._originals = {}
            if self._use_lottery_ticket_hypothesis and not self._resample_parameters:
                self._originals = {name: value.detach().clone() for name, value in self._values()}
        self._remove_hook()
        self._handle = pl_module.register_load_state_dict_pre_hook(partial(self._convert_loaded, stage == "fit"))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the masks that the checkpoint of a resumed fit contains.

        This happens here and not on loading, because the optimizers and the reducer must have the parameters first.
        """
        self._remove_hook()
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        pairs = dict(zip(self._names, self._parameters_to_prune, strict=True))
        with torch.no_grad():
            for name, mask in loaded["masks"].items():
                if name not in pairs:
                    continue
                part, own = pairs[name]
                if hasattr(part, f"{own}_mask"):  # another ModelPruning has restored it
                    continue
                parameter = getattr(part, own)
                hidden = loaded["hidden"].get(name)
                if hidden is not None:
                    parameter[mask.to(parameter.device) == 0] = hidden.to(parameter.device, parameter.dtype)
                prune.custom_from_mask(part, own, mask.to(parameter.device))
        self._originals.update({name: v for name, v in loaded["originals"].items() if name in self._originals})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._prune_on_train_epoch_end:
            self._run(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prune after a validation within a fit, if ``prune_on_train_epoch_end`` is False."""
        if not self._prune_on_train_epoch_end and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._run(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the masks if ``make_pruning_permanent`` is True; pruned elements are then ordinary zeros."""
        if self._make_pruning_permanent:
            self._last_masks = self._masks()
            self.make_pruning_permanent(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove from the model the hook that converts loaded state dicts."""
        self._remove_hook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove from the model the hook that converts loaded state dicts."""
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # -- pruning -------------------------------------------------------------------------------------------

    def _run(self, trainer: Trainer) -> None:
        epoch = trainer.current_epoch
        wanted = [
            setting(epoch) if callable(setting) else setting
            for setting in (self._apply_pruning, self.amount, self._use_lottery_ticket_hypothesis)
        ]
        # The user's functions may differ between ranks; the decisions must not.
        if trainer.world_size > 1:
            wanted = trainer.strategy.broadcast(wanted)
        prunes, amount, rewinds = wanted
        if not prunes or not amount:
            return
        self.apply_pruning(amount)
        if rewinds:
            self.apply_lottery_ticket_hypothesis()
        if trainer.world_size > 1:
            # Masks may be random, and so are resampled parameters: all ranks use those of rank 0.
            with torch.no_grad():
                own = [mask for _, mask in self._live_masks()]
                if rewinds and self._resample_parameters:
                    own += [value for _, value in self._values()]
                sent = trainer.strategy.broadcast([tensor.cpu() for tensor in own])
                for tensor, first in zip(own, sent, strict=True):
                    tensor.copy_(first)

    def apply_pruning(self, amount: int | float) -> None:
        """Immediately prune a fraction, or a number, of the elements that are not pruned yet.

        Args:
            amount: fraction (float, 0 to 1) or number (int) of elements.
        """
        before = self._zeros() if self._verbose else []
        if self._use_global_unstructured:
            # The user's class may not accept all of them, and torch passes on what it gets.
            takes = set(inspect.signature(self.pruning_fn).parameters)
            options = {key: v for key, v in {**self._options, "amount": amount}.items() if key in takes}
            prune.global_unstructured(self._parameters_to_prune, pruning_method=self.pruning_fn, **options)
        else:
            for module, name in self._parameters_to_prune:
                self.pruning_fn(module, name=name, amount=amount)
        if self._verbose:
            self._log_amounts(before, self._zeros(), amount)

    @torch.no_grad()
    def apply_lottery_ticket_hypothesis(self) -> None:
        """Reset the pruned parameters to their initial values, or to newly drawn values, and keep their masks."""
        shells: dict[int, nn.Module] = {}
        for name, (module, own) in zip(self._names, self._parameters_to_prune, strict=True):
            value = _value(module, own)
            if not self._resample_parameters:
                value.copy_(self._originals[name])
            elif callable(getattr(module, "reset_parameters", None)):
                if id(module) not in shells:
                    shells[id(module)] = _reinitialized(module)
                value.copy_(shells[id(module)]._parameters[own])  # type: ignore[arg-type]

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Remove all masks inside ``module``; pruned elements become zeros that training can change again.

        Args:
            module: module whose layers were pruned.
        """
        for part in module.modules():
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, prune.BasePruningMethod):
                    hook.remove(part)
                    del part._forward_pre_hooks[key]

    def _zeros(self) -> list[tuple[int, int]]:
        """Return for each parameter (number of pruned elements, number of all elements)."""
        masks = dict(self._live_masks())
        return [
            (int((masks[name] == 0).sum()) if name in masks else 0, value.numel()) for name, value in self._values()
        ]

    def _log_amounts(self, before: list[tuple[int, int]], now: list[tuple[int, int]], amount: int | float) -> None:
        def share(zeros: int, count: int) -> str:
            return f"{zeros}/{count} ({zeros / max(1, count):.2%})"

        count = sum(size for _, size in now)
        pair = [share(sum(zeros for zeros, _ in stats), count) for stats in (before, now)]
        method = getattr(self.pruning_fn, "func", self.pruning_fn)
        rank_zero_info("%s pruned: %s -> %s", getattr(method, "__name__", method), *pair)
        if self._verbose == 2:
            for name, old, new in zip(self._names, before, now, strict=True):
                rank_zero_info("  %s by %s: %s -> %s", name, amount, share(*old), share(*new))

    def _values(self) -> list[tuple[str, Tensor]]:
        """Return (name, unmasked parameter) for each parameter to prune."""
        pairs = zip(self._names, self._parameters_to_prune, strict=True)
        return [(name, _value(module, own)) for name, (module, own) in pairs]

    def _live_masks(self) -> list[tuple[str, Tensor]]:
        pairs = zip(self._names, self._parameters_to_prune, strict=True)
        found = ((name, getattr(module, f"{own}_mask", None)) for name, (module, own) in pairs)
        return [(name, mask) for name, mask in found if isinstance(mask, Tensor)]

    def _masks(self) -> dict[str, Tensor]:
        return {name: mask.detach().to("cpu", torch.bool) for name, mask in self._live_masks()}

    # -- checkpoints ---------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Key of the callback's state. Callbacks for different parameters have different keys."""
        if not self._requested:
            return super().state_key
        return self._generate_state_key(parameters=[_label(pair) for pair in self._requested])

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the masks, the values of pruned elements, and the initial values, by parameter names."""
        masks = self._masks()
        unmasked = {name: value.detach().cpu()[~masks[name]] for name, value in self._values() if name in masks}
        originals = {name: value.cpu() for name, value in self._originals.items()}
        state = {"masks": masks or self._last_masks, "hidden": unmasked, "originals": originals}
        return state if any(state.values()) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state until :meth:`on_fit_start` restores it."""
        self._loaded = {key: dict(state_dict.get(key, {})) for key in ("masks", "hidden", "originals")}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save pruned weights without masks if ``make_pruning_permanent`` is True; the model keeps its masks."""
        if self._make_pruning_permanent:
            _merge(checkpoint["state_dict"], _pruned_names(pl_module))

    def _convert_loaded(self, resumes: bool, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Remove masks from the model, and convert a state_dict with masks so that the model can load it.

        The masks themselves are restored in :meth:`on_fit_start`, when the optimizers have the parameters.
        """
        self.make_pruning_permanent(module)  # an earlier fit may have left masks in the model
        names = [key[: -len("_orig")] for key in state if key.endswith("_orig") and f"{key[:-5]}_mask" in state]
        if not resumes:
            _merge(state, names)
            return
        # The model has no masks at this point: it loads unmasked values under the parameters' own names.
        masks = {name.removeprefix(prefix): state.pop(f"{name}_mask").to(torch.bool) for name in names}
        for name in names:
            state[name] = state.pop(f"{name}_orig")
        if masks:
            self._loaded = {"masks": masks, "hidden": {}, "originals": {}}


def _has_parameter(module: nn.Module, name: str) -> bool:
    """Return True if a module has a parameter of this name, pruned or not."""
    return isinstance(module._parameters.get(name), nn.Parameter) or f"{name}_orig" in module._parameters


def _is_pair(pair: object) -> bool:
    """Return True if the argument is a pair ``(module, name)``."""
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(isinstance, pair, (nn.Module, str)))


def _refuse_missing(modules: Sequence[nn.Module], pairs: ParameterList) -> None:
    """Raise if the module of a pair is not among ``modules``, or does not have the parameter."""
    known = set(map(id, modules))
    strange = [type(module).__name__ for module, _ in pairs if id(module) not in known]
    lacking = [
        f"{type(module).__name__}.{name}"
        for module, name in pairs
        if id(module) in known and not _has_parameter(module, name)
    ]
    if strange or lacking:
        raise MisconfigurationException(
            "ModelPruning(parameters_to_prune=...): some don't exist in the model: "
            f"missing modules: {strange}, missing parameters: {lacking}."
        )


def _label(pair: object) -> str:
    """Return a pair ``(module, name)`` as text: the module's class, the parameter's shape and name.

    Invalid pairs are accepted.
    """
    if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
        return repr(pair)
    value = getattr(pair[0], f"{pair[1]}_orig", getattr(pair[0], str(pair[1]), None))
    return f"{type(pair[0]).__name__}{list(getattr(value, 'shape', ()))}.{pair[1]}"


def _names_of(module: nn.Module, pairs: ParameterList) -> list[str]:
    prefixes = {id(part): f"{name}." if name else "" for name, part in module.named_modules()}
    return [prefixes.get(id(part), "?.") + name for part, name in pairs]


def _by_name(module: nn.Module, names: Sequence[str]) -> ParameterList:
    parts = dict(module.named_modules())
    split = [name.rpartition(".") for name in names]
    return [(parts[owner], own) for owner, _, own in split if owner in parts]


def _value(module: nn.Module, name: str) -> Tensor:
    """Return a parameter. If the parameter is pruned, return the unmasked original."""
    found = module._parameters.get(f"{name}_orig", module._parameters.get(name))
    assert found is not None
    return found


def _reinitialized(module: nn.Module) -> nn.Module:
    """Return a shallow copy of a module whose own parameters are newly initialized."""
    shell = copy.copy(module)
    own = {name.removesuffix("_orig"): value for name, value in module._parameters.items()}
    shell._parameters = {
        name: None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)
        for name, value in own.items()
    }
    shell._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    for name in own:
        vars(shell).pop(name, None)  # the product with the mask, which would hide the new parameter
    shell.reset_parameters()  # type: ignore[operator]
    return shell


def _pruned_names(module: nn.Module) -> list[str]:
    """Return the names of all pruned parameters in a module; a shared submodule's parameters have several names."""
    return [
        f"{prefix}.{hook._tensor_name}" if prefix else hook._tensor_name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for hook in part._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod) and isinstance(hook._tensor_name, str)
    ]


def _merge(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Replace each pruned parameter and its mask in a state_dict by the product of the two."""
    changed = cast(dict[str, Any], state)
    for name in names:
        if f"{name}_orig" in changed and f"{name}_mask" in changed:
            unmasked, mask = changed.pop(f"{name}_orig"), changed.pop(f"{name}_mask")
            changed[name] = mask.to(unmasked.dtype) * unmasked
