"""The forms in which users write the same thing: hooks that are decorated or set on an instance, metric objects in odd
places, loaders with a state, optimization by hand, checkpoints ranked by a validation."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.differential.further import program_of
from tests.differential.program import VAL, Program, some
from tests.golden.recorder import CALLBACK_HOOKS, MODULE_HOOKS

if TYPE_CHECKING:
    from tests.differential.play import Player

BY_HAND = (
    "wrapped",
    "raw",
    "kept",
    "inner",
    "torch clip",
    "value clip",
    "sam",
    "accumulated",
    "closure",
    "two backwards",
    "toggled",
    "now and then",
)
"""How a manual ``training_step`` steps; ``by_hand.py`` has what each does."""
PAST_WRAPPER = ("raw", "kept", "inner")
"""Those that step an optimizer which Lightning does not see."""
METRICS = (
    "attribute",
    "forward",
    "in a dict",
    "in a list",
    "collection",
    "hidden",
    "in validation",
    "at the end",
    "computed",
    "in a callback",
    "two names",
    "named",
)
"""Where a metric object lies, and how it is logged."""
HOOKS = ("keyword", "no_grad", "rank_zero_only", "wraps", "instance")


# -- hooks -----------------------------------------------------------------------------------------------------


def with_wraps(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    return wrapper


def by_keyword(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Lightning gives setup and teardown their stage by its name."""
    if name not in ("setup", "teardown"):
        return hook

    def call(self: Any, *args: Any, stage: str) -> Any:
        return hook(self, *args, stage)

    return call


def in_form(player: Player, methods: dict[str, Any]) -> dict[str, Any]:
    """The methods of a class, each in the program's form; those that do work stay as they are."""
    form = player.program.form
    decorate: Callable[[Any], Any] = {
        "no_grad": torch.no_grad(),
        "rank_zero_only": player.part("utilities").rank_zero_only,
        "wraps": with_wraps,
    }.get(form, lambda hook: hook)
    hooks = (*MODULE_HOOKS, *CALLBACK_HOOKS)
    made = {name: decorate(hook) if name in hooks else hook for name, hook in methods.items()}
    return {name: by_keyword(hook, name) for name, hook in made.items()} if form == "keyword" else made


def put_on_instance(player: Player, thing: Any, names: list[str]) -> Any:
    """The object, whose hooks are attributes of its own where the program has it so."""
    wrap: Callable[[Any], Any] | None = {
        "instance": lambda bound: lambda *args, **kwargs: bound(*args, **kwargs),
    }.get(player.program.form)
    for name in names if wrap is not None else ():
        assert wrap is not None
        vars(thing)[name] = wrap(getattr(thing, name))
    return thing


# -- metric objects ---------------------------------------------------------------------------------------------


class Metrics:
    """The metric objects of a program, in the place where it keeps them."""

    def __init__(self, player: Player, module: Any) -> None:
        import torchmetrics

        self.player, self.kind = player, player.program.metrics
        mean = torchmetrics.MeanMetric
        if self.kind == "in a dict":
            module.kept = nn.ModuleDict({"one": mean()})
        elif self.kind == "in a list":
            module.kept = nn.ModuleList([mean(), torchmetrics.MaxMetric()])
        elif self.kind == "collection":
            module.kept = torchmetrics.MetricCollection({"low": torchmetrics.MinMetric(), "mean": mean()})
        elif self.kind == "hidden":
            module.kept = [mean()]
        else:
            module.kept = mean()

    def step(self, module: Any, stage: str, loss: Tensor) -> None:
        """What a step does with them."""
        value = loss.detach().float()
        if (stage == "validation") != (self.kind == "in validation") or stage not in ("train", "validation"):
            return
        kept = module.kept
        if self.kind == "collection":
            kept.update(value)
            module.log_dict(kept, on_epoch=True)
            return
        if self.kind in ("in a dict", "in a list", "hidden"):
            for place, metric in enumerate(kept.values() if self.kind == "in a dict" else kept):
                metric.update(value)
                module.log(f"metric{place}", metric, on_step=place == 0, on_epoch=True)
            return
        kept(value) if self.kind == "forward" else kept.update(value)
        if self.kind == "in a callback":
            return
        if self.kind not in ("at the end", "computed"):
            more = {"metric_attribute": "kept"} if self.kind == "named" else {}
            module.log("metric", kept, **({"on_step": True, "on_epoch": True} if stage == "train" else {}), **more)
        if self.kind == "two names":
            module.log("again", kept, on_step=False, on_epoch=True)

    def end(self, owner: str, hook: str, target: Any) -> None:
        """What a hook does with them at an epoch's end."""
        module = self.player.module
        if hook != "on_train_epoch_end" or owner != {"in a callback": "callback"}.get(self.kind, "module"):
            return
        if self.kind == "at the end":
            module.log("metric", module.kept)
        if self.kind in ("computed", "in a callback"):
            target.log("metric", module.kept.compute())
            module.kept.reset()


# -- loaders with a state ---------------------------------------------------------------------------------------


class WithState:
    """Batches that are there, in a loader that knows where it is: as in torchdata, a pass goes on from a state that was
    loaded, and begins anew else."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches, self.place, self.loaded = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        first, self.loaded = self.loaded, 0
        for place in range(first, len(self.batches)):
            self.place = place + 1
            yield self.batches[place]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place % len(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = int(state["place"])


def with_state(player: Player, first: list[Tensor], second: list[Tensor]) -> Any:
    size = player.batch_size
    made = WithState([torch.stack(first[place : place + size]) for place in range(0, len(first), size)])
    if player.program.train == "with state":
        return made
    pair = [made, DataLoader(second, batch_size=size)]  # type: ignore[arg-type]
    return player.part("utilities.combined_loader").CombinedLoader(pair, mode=player.program.train.split()[-1])


# -- drawing ----------------------------------------------------------------------------------------------------


def _hooks(p: Program, r: random.Random) -> Program:
    hooks = p.hooks if p.hooks != "callback" else r.choice(("all", "working"))
    return replace(p, form=r.choice((*HOOKS, *HOOKS[1:4])), hooks=hooks)


def _lambdas(p: Program, r: random.Random) -> Program:
    hooks = tuple(r.sample([name for name in CALLBACK_HOOKS if name != "on_exception"], 6))
    return replace(p, callbacks=(*p.callbacks, ("LambdaCallback", {"hooks": hooks})))


def _metrics(p: Program, r: random.Random) -> Program:
    return replace(p, metrics=r.choice(METRICS), hooks="all" if p.hooks == "callback" else p.hooks)


def _with_state(p: Program, r: random.Random) -> Program:
    kept: dict[str, Any] = {"every_n_train_steps": r.choice((1, 2, 3)), "save_top_k": -1}
    callbacks = (*(part for part in p.callbacks if part[0] != "ModelCheckpoint"), ("ModelCheckpoint", kept))
    calls = r.choice((("fit",), ("fit", "resume mid"), ("fit", "resume mid"), ("fit", "resume")))
    train = r.choice(("with state", "with state", "with state beside max_size", "with state beside min_size"))
    data = "module" if p.data == "arguments" else p.data
    acts = tuple(act for act in p.acts if act.kind != "end epoch")
    p = replace(p, train=train, calls=calls, callbacks=callbacks, data=data, acts=acts)
    return replace(p, train_samples=(r.randint(5, 11), 6))


def _by_hand(p: Program, r: random.Random) -> Program:
    dropped = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    flags = {name: value for name, value in p.flags.items() if name not in dropped}
    flags["precision"] = r.choice(("32-true", "32-true", "bf16-mixed", "64-true"))
    way = r.choice(BY_HAND)
    optimizers = tuple(r.choice(("sgd", "adam")) for _ in range(r.choice((1, 1, 2))))
    kinds = ("GradientAccumulationScheduler", "StochasticWeightAveraging", "BackboneFinetuning", "Unfreezing")
    callbacks = tuple(part for part in p.callbacks if part[0] not in kinds)
    schedulers = p.schedulers[:1] if len(optimizers) == 1 else ()
    calls = ("fit",) if "barebones" in flags else p.calls
    p = replace(p, flags=flags, manual=True, by_hand=way, optimizers=optimizers, callbacks=callbacks, calls=calls)
    return replace(p, schedulers=schedulers, iter_step=False, backbone=False, late=False)


def _ranked(p: Program, r: random.Random) -> Program:
    """A ModelCheckpoint that saves by steps or by time, ranked by what a validation logs."""
    kept: dict[str, Any] = {"monitor": "val", "filename": "{epoch}-{step}"}
    kept |= r.choice(({"every_n_train_steps": r.choice((1, 2, 3))}, {"train_time_interval": "at once"}))
    kept |= some(r, 0.4, save_top_k=(1, 2, -1), mode=("min", "max"), save_last=(True, "link"))
    times = {"val_check_interval": r.choice((1, 2, 3, 0.5)), "check_val_every_n_epoch": r.choice((1, 1, 2))}
    flags = {**p.flags, "num_sanity_val_steps": r.choice((0, 0, 1)), "max_epochs": r.choice((2, 3, 4)), **times}
    for name in ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run", "max_steps"):
        flags.pop(name, None)
    flags = {name: value for name, value in flags.items() if name not in ("min_steps", "min_epochs")}
    logs = p.logs if VAL in p.logs else (*(log for log in p.logs if log.hook != "validation_step"), VAL)
    callbacks = (*(part for part in p.callbacks if part[0] != "ModelCheckpoint"), ("ModelCheckpoint", kept))
    return replace(
        p,
        flags=flags,
        logs=logs,
        callbacks=callbacks,
        val_loaders=(4,),
        train=r.choice(("in order", "shuffled")),
        train_samples=(r.randint(6, 12), 4),
        batch_size=2,
        calls=r.choice((("fit",), ("fit", "test best"), ("fit", "resume best"))),
    )


WAYS: list[Callable[[Program, random.Random], Program]] = [
    _hooks,
    _hooks,
    _hooks,
    _lambdas,
    _metrics,
    _metrics,
    _with_state,
    _with_state,
    _by_hand,
    _by_hand,
    _by_hand,
    _ranked,
    _ranked,
    _ranked,
]


def program_in_forms(seed: int) -> Program:
    """The program of a seed, with one or two of the forms above."""
    r = random.Random(f"forms of {seed}")
    program = program_of(seed)
    if r.random() < 0.7:  # else its odd parts stay, too
        program = replace(program, profiler=None, acts=program.acts[:1])
    for way in r.sample(WAYS, r.choice((1, 1, 2))):
        program = way(program, r)
    return program
