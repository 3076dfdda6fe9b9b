"""What ``Trainer(plugins=...)`` may hold, and what is said of objects that an installed Lightning made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.io import CheckpointIO
from lockstep.cluster.environments import DescribesRanks, LightningEnvironment, describes_ranks, environment_named
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import Precision

# -- objects of an installed Lightning -----------------------------------------------------------------------


PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def check_kind(where: str, thing: object, kind: type, name: str) -> None:
    """Refuse what is no instance of ``kind``.

    Args:
        where: the call and its argument, for the message.
        thing: what was given.
        kind: lockstep's class.
        name: how users import it from lockstep.

    Raises:
        MisconfigurationException: a class in place of an instance, an object of Lightning's, or something else.
    """
    if isinstance(thing, type) and issubclass(thing, kind):
        raise MisconfigurationException(f"{where}: {thing.__name__} is a class; give an instance, {thing.__name__}().")
    if isinstance(thing, kind):
        return
    check_not_lightnings(where, thing)
    shown = type(thing).__name__ if not isinstance(thing, type) else f"the class {thing.__name__}"
    raise MisconfigurationException(f"{where}: give a lockstep.{name}, not {shown} ({thing!r:.100}).")


def check_not_lightnings(where: str, thing: object) -> None:
    """Refuse an object whose class derives from one of an installed Lightning.

    Raises:
        MisconfigurationException: with the import to change.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    base = next((base for base in kind.__mro__ if base.__module__.split(".")[0] in PACKAGES), None)
    if base is not None:
        root = base.__module__.split(".")[0]
        package = "lightning.pytorch" if root == "lightning" else root
        raise MisconfigurationException(
            f"{where}: {kind.__name__} derives from {base.__module__}.{base.__qualname__}, and a Trainer of lockstep "
            f"runs classes of lockstep: change its import from `{package}` to `lockstep`, or leave the script as it is "
            "and start it by `lockstep run --lightning script.py`."
        )


def check_constructed(where: str, thing: object, attribute: str) -> None:
    """Refuse an object whose class forgot to call the constructor of its base.

    Args:
        where: the call, for the message.
        thing: a module or data module.
        attribute: that the base's ``__init__`` sets.

    Raises:
        MisconfigurationException: with the line to add.
    """
    if attribute not in vars(thing):
        name = type(thing).__name__
        raise MisconfigurationException(
            f"{where}: {name}.__init__ does not call `super().__init__()`; make it its first line."
        )


# -- plugins -------------------------------------------------------------------------------------------------


# Lightning's other kinds of plugins, by the name of a class that an object's class derives from, and why lockstep has
# no place for them.
REFUSED = {
    "CheckpointIO": "its class derives from Lightning's CheckpointIO; import that from lockstep.plugins.io, where the "
    "methods are the same",
    "LayerSync": "lockstep synchronizes BatchNorm itself; use Trainer(sync_batchnorm=True)",
    "Precision": "a precision of Lightning's works in Lightning's loops; name one by Trainer(precision=...), or derive "
    "it from lockstep's Precision",
}


@dataclass(frozen=True)
class Plugins:
    """The plugins of a Trainer, sorted."""

    precision: Precision | None = None
    cluster: DescribesRanks | None = None
    checkpoint_io: CheckpointIO | None = None


def sort_plugins(given: object, precision_flag: str | int | None, carried: Iterable[Any] = ()) -> Plugins:
    """Tell a Trainer's plugins apart.

    Args:
        given: as in ``Trainer(plugins=...)``: None, one, or several.
        precision_flag: as in ``Trainer(precision=...)``, which must not name another precision.
        carried: plugins that were given to the strategy.

    Raises:
        MisconfigurationException: a plugin that lockstep has no place for, or two of one kind.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    named = (environment_named(plugin) if isinstance(plugin, str) else plugin for plugin in carried)
    several = [*(several if given is not None else ()), *named]
    found: dict[str, Any] = {}
    for plugin in several:
        kind = _kind(plugin)
        if kind is None:
            raise MisconfigurationException(f"Trainer(plugins={plugin!r:.100}): {_reason(plugin)}.")
        if kind in found:
            raise MisconfigurationException(
                f"Trainer(plugins=[{type(found[kind]).__name__}(), {type(plugin).__name__}()]): there is one {kind}; "
                "give one of them."
            )
        found[kind] = plugin
    if "precision" in found and precision_flag is not None:
        raise MisconfigurationException(
            f"Trainer(precision={precision_flag!r}, plugins={type(found['precision']).__name__}()): both choose the "
            "precision; leave one out."
        )
    cluster = found.get("cluster")
    if cluster is not None and not cluster.creates_processes_externally:
        if type(cluster).__name__ != "LightningEnvironment":  # that one describes what lockstep does by itself
            raise MisconfigurationException(
                f"Trainer(plugins={type(cluster).__name__}()): its creates_processes_externally is False, and lockstep "
                'starts ranks by its own means: leave the plugin out and let strategy="ddp" start them, or return True.'
            )
        found["cluster"] = LightningEnvironment()
    return Plugins(**found)


def _kind(plugin: object) -> str | None:
    if isinstance(plugin, Precision):
        return "precision"
    if isinstance(plugin, CheckpointIO):
        return "checkpoint_io"
    return "cluster" if describes_ranks(plugin) else None


def _reason(plugin: object) -> str:
    if isinstance(plugin, str):
        return "plugins are no longer given by name; choose by `strategy=` and `precision=`"
    names = [base.__name__ for base in (plugin if isinstance(plugin, type) else type(plugin)).__mro__]
    if isinstance(plugin, type):
        return f"this is a class; give an instance, {plugin.__name__}(...)"
    reason = next((why for name, why in REFUSED.items() if name in names), None)
    return reason or "lockstep takes a lockstep Precision, a ClusterEnvironment or a CheckpointIO here"
