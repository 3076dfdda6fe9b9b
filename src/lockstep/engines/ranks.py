"""The base of strategies whose ranks are processes: they meet, and make a process group.

Beside it: arguments that other libraries know, which have a place here, and the reason where not.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.io import CheckpointIO
from lockstep.cluster.limits import provide_files
from lockstep.cluster.local import let_others_call
from lockstep.cluster.meeting import meet
from lockstep.cluster.world import World
from lockstep.engines.collectives import column_group, group_among
from lockstep.engines.strategy import Strategy
from lockstep.ground import comm
from lockstep.ground.accelerators import carries
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork_and_exit import protect_forks, settle, settle_at_exit
from lockstep.ground.installed import EXIT_GROUP
from lockstep.ground.rank import does, rank_zero_info
from lockstep.ground.types import LRSchedulerConfig
from lockstep.launch.script import side
from lockstep.precision.base import Precision
from lockstep.supervise.client import meet_nodes
from lockstep.supervise.collective_trace import install_trace
from lockstep.supervise.signals import ending_at_once
from lockstep.supervise.status import met

if TYPE_CHECKING:
    from lockstep.cluster.nccl import NcclVariables

HALF_AN_HOUR = timedelta(minutes=30)

MAX_NORM = (
    "{strategy} on {replicas} replicas: the {kind} {name!r} has max_norm={max_norm}. Its forward scales the rows that "
    "it looks up, in the weight itself, and each rank looks up rows of its own: the ranks would no longer have one "
    "model. Take max_norm=None and scale what the layer returns, `x = x * (max_norm / x.norm(dim=-1, "
    "keepdim=True)).clamp(max=1.0)`, or train on one device."
)

CONNECTED = 1024
"""Ranks from which on what is on the CPU travels by the devices: gloo connects each two ranks."""

BOUND = ("nccl", "xccl")
"""Backends that are told the device of a rank when the group is made."""


class RankedStrategy(Strategy):
    """One process for each device, joined to a process group.

    Args:
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        process_group_backend: "gloo", "nccl", or one for each kind of device, as torch writes them; default: gloo for
            what is on the CPU and torch's own for the kind of device, ``"cpu:gloo,cuda:nccl"``; that of another kind
            is the one that its package has registered.
        timeout: how long a collective waits for the other ranks; None: 30 minutes.
        start_method: "popen" (this script once per rank), "spawn" (the call, in fresh processes) or "fork" (the call,
            in copies of this process, which start at once and share its memory).
        nccl: NCCL's variables, with or without ``NCCL_``, set before the group is made where neither the shell nor
            the cluster has set them: ``{"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2}``.

    Raises:
        MisconfigurationException: for an argument that cannot be.
    """

    keeps_parameters_on_cpu = False

    def __init__(
        self,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        start_method: str = "popen",
        nccl: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if start_method not in ("popen", "spawn", "fork"):
            raise MisconfigurationException(
                f'{name}(start_method={start_method!r}): choose "popen" (this script once per rank), '
                '"spawn" (the call, in fresh processes) or "fork" (the call, in copies of this process).'
            )
        self.plugins = _checked_plugins(name, cluster_environment, checkpoint_io, precision_plugin)
        self.launcher = "script" if start_method == "popen" else start_method
        self._backend = _checked_backend(name, process_group_backend)
        self._timeout = _checked_timeout(name, timeout)
        self._nccl = None if nccl is None else _nccl_variables(nccl)

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """As on one process; where NCCL is to be used and cannot be, that is said before anything is started."""
        super().connect(world, device, precision)
        backend = self.process_group_backend
        if world.size > 1 and (backend == "nccl" or (device.type == "cuda" and "nccl" in backend)):
            _check_nccl(device.type)
        if world.size > 1 and device.type != "cpu" and not carries(backend, device.type):
            raise MisconfigurationException(
                f"{world.size} ranks on {device.type!r} devices: the backend {backend!r} of process groups does not "
                f"carry their tensors: use devices=1, or {type(self).__name__}(process_group_backend=...) with the one "
                "of the device's package."
            )
        if world.size > 1:
            self._check_reach(backend)

    def setup_environment(self) -> None:
        """Join the process group, making it where it is not there."""
        super().setup_environment()
        protect_forks()
        settle_at_exit()
        world = self.world
        if self._nccl is not None:
            told = self._nccl.apply(self.process_group_backend, dist.is_initialized())
            if told is not None:
                rank_zero_info(told)
        if dist.is_initialized():
            self._check_group()
        else:
            # nothing can be lost yet, and the others may be gone; one rank alone may be a notebook's kernel
            with ending_at_once() if world.size > 1 else contextlib.nullcontext():
                self._make_group()
        met()
        install_trace()
        if dist.get_world_size() != world.size:
            raise MisconfigurationException(
                f"A process group of {dist.get_world_size()} ranks is there already, and this run has {world.size}: "
                "give Trainer `devices` and `num_nodes` to match, or let lockstep make the group. If an earlier call "
                "of this script made it, on other devices: a script has one number of ranks; give "
                'strategy="ddp_spawn", whose ranks are there for one call, or put the two into scripts of their own.'
            )
        if self.peers is None and self.replicas.count < world.size:
            self.peers = column_group(self.replicas, self._timeout)
            self.members = group_among(self.replicas.rows, self._timeout)

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """As on one process; layers whose forwards change weights on their rank alone are refused."""
        if self.replicas.count > 1:
            self._refuse_max_norm()
        super().setup_optimizers(optimizers, configs)

    def _refuse_max_norm(self) -> None:
        for name, layer in self.module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
                about = {"kind": type(layer).__name__, "name": name, "max_norm": layer.max_norm}
                strategy, replicas = type(self).__name__, self.replicas.count
                raise MisconfigurationException(MAX_NORM.format(strategy=strategy, replicas=replicas, **about))

    @property
    def process_group_backend(self) -> str:
        """What carries messages: as asked, else gloo for what is on the CPU, and for the devices torch's own.

        From `CONNECTED` ranks on, each of which would be connected with all others, messages go by the device, unless
        there are parameters on the CPU.
        """
        if self._backend is None and self.drives_all_devices:
            return "gloo"  # one process sends nothing, and NCCL would want a GPU for it
        if self._backend is not None or self.accelerator_backend:
            return self._backend or self.accelerator_backend
        kind = self.root_device.type
        own = dist.Backend.default_device_backend_map.get(kind, "gloo")
        if own == "gloo":
            return "gloo"
        connects = self.world.size < CONNECTED or self.keeps_parameters_on_cpu
        return f"cpu:gloo,{kind}:{own}" if connects and dist.is_gloo_available() else own

    def _check_reach(self, backends: str) -> None:
        """Refuse gloo for what it cannot do with tensors of a CUDA device.

        Args:
            backends: of a process group, as torch writes them.

        Raises:
            MisconfigurationException: this strategy would do it, and the process would be killed by SIGSEGV.
        """
        kind = self.root_device.type
        reaches = kind == "cpu" or self.keeps_parameters_on_cpu or _own(backends, kind) != "gloo"
        # parts of parameters or activations travel, beside sums and copies of whole gradients and parameters
        if self.holds_parts and not self.drives_all_devices and not reaches:
            raise MisconfigurationException(
                f"{type(self).__name__} with the backend {backends!r} of process groups: gloo adds up and copies "
                f"tensors of {kind!r} devices, and does nothing else with them: leave out process_group_backend, or "
                f'make the group by torch.distributed.init_process_group("cpu:gloo,{kind}:nccl").'
            )

    def _check_group(self) -> None:
        """Look at a process group that somebody else has made.

        Raises:
            MisconfigurationException: it does not carry the tensors that it would have to.
        """
        backends, kind = dist.get_backend_config(), self.root_device.type
        carried = [entry.partition(":")[0] for entry in backends.split(",")]
        wanted = backends if kind in carried else self.process_group_backend
        if "cpu" not in carried and "gloo" not in wanted:
            wanted = f"cpu:gloo,{wanted}"
        way_out = f'torch.distributed.init_process_group("{wanted}"), or let lockstep make it'
        if kind not in carried and self.world.size > 1:
            raise MisconfigurationException(
                f"The process group that is there ({backends}) carries no tensors of {kind!r} devices, and this run is "
                f"on such: make it by {way_out}."
            )
        if self.world.size > 1:
            self._check_reach(backends)
        if "cpu" in carried:
            return
        if self.keeps_parameters_on_cpu:
            raise MisconfigurationException(
                f"{type(self).__name__}: parameters on the CPU, and the process group that is there ({backends}) "
                f"carries none of them: make it by {way_out}."
            )
        told = (
            f"The process group that is there ({backends}) carries no tensors of the CPU: small messages of the host "
        )
        rank_zero_info(f"{told}go by the device, which waits for each of them. Make it by {way_out}.")

    @does("joining the other ranks")
    def _make_group(self) -> None:
        # The functions of this module have the default group for a default argument, taken when it is imported (torch's
        # optimizers do so). Imported after the group is made they would hold it beyond its destruction, with gloo's
        # threads running into the end of the interpreter, which aborts one process in five.
        import torch.distributed.nn.functional  # noqa: F401

        world, backend = self.world, self.process_group_backend
        if backend == "nccl" and self.root_device.type != "cuda":
            _check_nccl(self.root_device.type)  # `connect` asks for several ranks only
        let_others_call(world)
        if world.size > 1 and ("gloo" in backend or "nccl" not in backend):  # NCCL has few connections
            provide_files(world.size)
        # one rank has nobody to meet, so that no port is needed
        store = dist.HashStore() if world.size == 1 else meet(world, self._timeout)
        meet_nodes(side(), world, store)
        # without it NCCL connects when it is first used, and once more for each pair that sends and receives
        device = self.root_device if _own(backend, self.root_device.type) in BOUND else None
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=self._timeout, device_id=device, store=store
        )
        EXIT_GROUP.at_exit(_leave_group)
        # a rank that fails before the others have connected to it would break their connecting, which hides its error
        comm.barrier()

    def teardown(self) -> None:
        """The process group stays for the next call."""
        super().teardown()
        if self._nccl is not None:
            self._nccl.restore()


def _own(backend: str, kind: str) -> str:
    """Of a backend of process groups, as torch writes it, that of a kind of device."""
    return dict(entry.split(":") for entry in backend.split(",")).get(kind, "") if ":" in backend else backend


# Loaded where they are asked for: most runs need neither, and importing lockstep is to be quick.


def _nccl_variables(asked: Mapping[str, Any]) -> NcclVariables:
    from lockstep.cluster.nccl import NcclVariables

    return NcclVariables(asked)


def _check_nccl(device_type: str) -> None:
    from lockstep.cluster.nccl import check_nccl

    check_nccl(device_type)


def _leave_group() -> None:
    if dist.is_initialized():
        # gloo's threads need the interpreter's lock to let go of the last collective's tensors; destroying the group
        # waits for them and holds it, so they get a moment first
        with contextlib.suppress(RuntimeError):  # torch's complaint about a loader worker that this exit has killed
            settle()
        with contextlib.suppress(RuntimeError):
            if getattr(sys, "last_value", None) is None or not _has_queue():
                dist.destroy_process_group()
            else:  # NCCL would end what is queued first, and that may wait for a rank that is gone
                dist.distributed_c10d._abort_process_group()


def _has_queue() -> bool:
    """Whether some backend of the ranks' group leaves its collectives in a device's queue."""
    return any(entry.rpartition(":")[2] != "gloo" for entry in dist.get_backend_config().split(","))


# -- arguments that other libraries know -----------------------------------------------------------------------


_DEVICES = "each rank has the device that the Trainer gives it; choose them by Trainer(accelerator=..., devices=...)"
_GROUP = (
    "the group of a run is all its ranks, who share data and checkpoints; a smaller one for gradients is for a "
    "hand-written loop with lockstep.DistributedDataParallel"
)
_OVERLAP = (
    "an optimizer inside the backward would see gradients before they are clipped and unscaled; use "
    "shard_optimizer=True to spread its work, or a hand-written loop"
)
REFUSED = {
    "accelerator": _DEVICES,
    "parallel_devices": _DEVICES,
    "device_ids": _DEVICES,
    "output_device": _DEVICES,
    "dim": "nothing is scattered: each rank draws its own batches",
    "process_group": _GROUP,
    "device_mesh": _GROUP,
    "offload_optimizer": 'the states stay beside their parameters; take strategy="fsdp_cpu_offload"',
    "mixed_precision": "choose the precision by Trainer(precision=...)",
    "delay_all_reduce_named_params": _OVERLAP,
    "param_to_hook_all_reduce": _OVERLAP,
}
"""Arguments of Lightning's DDPStrategy and of torch's DistributedDataParallel that have no place, and why."""

NO_EFFECT = dict.fromkeys(
    ("find_unused_parameters", "skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation")
)
"""Of DDP, taken and not needed: unused parameters are found anyway, and a bucket's gradients copied together."""

_UNSET = ("broadcast_buffers", "forward_sync_buffers")
_AS_ALWAYS: dict[str, tuple[Any, ...]] = {"dim": (0, None), "offload_optimizer": (False, None)}


def check_others(
    strategy: str, others: Mapping[str, Any], known: Iterable[str], no_effect: Mapping[str, str | None]
) -> None:
    """Look through the arguments that a strategy has no name for.

    Args:
        strategy: name of its class.
        others: name -> value.
        known: the names that it has.
        no_effect: names that are taken without effect, and why, which is logged; None: without a word.

    Raises:
        MisconfigurationException: for one that has no place here, with the way out, and for one that nobody knows.
    """
    for name, value in others.items():
        start = f"{strategy}({name}={value!r:.100})"
        if name in no_effect:
            reason = no_effect[name]
            if reason is not None:
                rank_zero_info(f"{start} has no effect: {reason}.")
            continue
        if name in REFUSED:
            if value in _AS_ALWAYS.get(name, (None,)):
                continue
            raise MisconfigurationException(f"{start}: {REFUSED[name]}.")
        near = difflib.get_close_matches(name, [*known, *no_effect], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise MisconfigurationException(f"{start}: there is no such argument.{hint}")


def checked_cap(name: str, value: float | None, default: float) -> float:
    """A size in MiB above 0; None is the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise MisconfigurationException(f"DDPStrategy({name}={value!r}): give a size in MiB above 0.")
    return float(value)


def checked_caps(name: str, caps: Sequence[float] | None, default: float) -> list[float]:
    """Sizes in MiB above 0; None is no size, and in the list the default.

    Raises:
        MisconfigurationException: for anything else.
    """
    if caps is not None and (isinstance(caps, str) or not isinstance(caps, Sequence)):
        raise MisconfigurationException(f"DDPStrategy({name}={caps!r:.100}): give a list of sizes in MiB, [1, 25].")
    return [checked_cap(name, cap, default) for cap in caps or ()]


def check_switches(**switches: object) -> None:
    """Refuse what is neither True nor False: a text like "False" would switch on.

    Raises:
        MisconfigurationException: with the argument's name.
    """
    for name, value in switches.items():
        if value is None and name in _UNSET:
            continue
        if isinstance(value, str) or value not in (False, True):
            raise MisconfigurationException(f"DDPStrategy({name}={value!r:.100}): give True or False.")


def _checked_timeout(strategy: str, timeout: timedelta | None) -> timedelta:
    """A length of time above 0; None is half an hour.

    Raises:
        MisconfigurationException: for anything else.
    """
    if timeout is None:
        return HALF_AN_HOUR
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise MisconfigurationException(
            f"{strategy}(timeout={timeout!r:.100}): give a datetime.timedelta above 0, timedelta(minutes=5) say; None "
            "is half an hour."
        )
    return timeout


def _checked_backend(strategy: str, backend: str | None) -> str | None:
    """The name of a backend of process groups, or names by device ("cpu:gloo,cuda:nccl"), as torch writes them.

    Raises:
        MisconfigurationException: for one that torch does not know, and nobody has registered.
    """
    if backend is None:
        return None
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    names = str(backend).lower()
    for entry in names.split(","):
        name = entry.rpartition(":")[2]
        if not isinstance(backend, str) or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise MisconfigurationException(
                f"{strategy}(process_group_backend={backend!r:.100}): torch knows {', '.join(known)}.{hint}"
            )
    return names


def _checked_plugins(strategy: str, cluster: object, io: object, precision: object) -> list[object]:
    """Those of the three that are there, as ``Trainer(plugins=[...])`` takes them.

    Raises:
        MisconfigurationException: for a name: there only a cluster has one.
    """
    for argument, given in (("checkpoint_io", io), ("precision_plugin", precision)):
        if isinstance(given, str):
            raise MisconfigurationException(
                f"{strategy}({argument}={given!r:.100}): give an object"
                + (", or choose by Trainer(precision=...)." if given is precision else " of a CheckpointIO's class.")
            )
    return [plugin for plugin in (cluster, io, precision) if plugin is not None]
