"""Base class of the strategies with one process per rank, and checks of their arguments."""

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
from lockstep.cluster.local import choose_gloo_interface
from lockstep.cluster.rendezvous import connect_ranks
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
from lockstep.supervise.client import connect_nodes
from lockstep.supervise.collective_trace import install_trace
from lockstep.supervise.signals import ending_at_once
from lockstep.supervise.status import record_join

if TYPE_CHECKING:
    from lockstep.cluster.nccl import NcclVariables

HALF_AN_HOUR = timedelta(minutes=30)

MAX_NORM = (
    "{strategy} on {replicas} replicas cannot train the {kind} {name!r} with max_norm={max_norm}: its forward rescales "
    "the weight's rows that it looks up, and the ranks' weights would differ, since each looks up different rows. Use "
    "max_norm=None and rescale the layer's output, `x = x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1.0)`, "
    "or train on one device."
)

CONNECTED = 1024
"""World size from which the device's backend also sends CPU tensors, because gloo connects each pair of ranks."""

BOUND = ("nccl", "xccl")
"""Backends to which the rank's device is passed when the process group is created."""


class RankedStrategy(Strategy):
    """Base class of the strategies with one process per device, in a process group.

    Args:
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        process_group_backend: "gloo", "nccl", or one per type of device, as torch writes them. Default: gloo for CPU
            tensors and torch's own for the device, ``"cpu:gloo,cuda:nccl"``, or the one that the package of another
            device has registered.
        timeout: time that a collective waits for the other ranks, a ``datetime.timedelta``; None: 30 minutes.
        start_method: "popen" (this script once per rank), "spawn" (the call, in fresh processes) or "fork" (the call,
            in copies of this process, which start at once and share its memory).
        nccl: NCCL's variables, with or without ``NCCL_``. They are set before the group is created, unless the shell
            or the cluster has set them: ``{"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2}``.

    Raises:
        MisconfigurationException: an argument is invalid.
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
                f'{name}(start_method={start_method!r}) is not known. Use "popen" (start this script once per rank), '
                '"spawn" (run the call in fresh processes) or "fork" (run the call in copies of this process).'
            )
        # only a cluster may be given by name
        for argument, plugin in (("checkpoint_io", checkpoint_io), ("precision_plugin", precision_plugin)):
            if isinstance(plugin, str):
                use = "a CheckpointIO object" if argument == "checkpoint_io" else "Trainer(precision=...)"
                raise MisconfigurationException(f"{name}({argument}={plugin!r:.100}) must not be a string: use {use}.")
        given = (cluster_environment, checkpoint_io, precision_plugin)
        self.plugins = [plugin for plugin in given if plugin is not None]
        self.launcher = "script" if start_method == "popen" else start_method
        self._backend = _checked_backend(name, process_group_backend)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise MisconfigurationException(
                f"{name}(timeout={timeout!r:.100}) is not a positive duration. Pass a datetime.timedelta, such as "
                "timedelta(minutes=5), or None for 30 minutes."
            )
        self._timeout = HALF_AN_HOUR if timeout is None else timeout
        self._nccl: NcclVariables | None = None
        if nccl is not None:
            # few runs need it, and importing lockstep must be fast
            from lockstep.cluster.nccl import NcclVariables as Variables

            self._nccl = Variables(nccl)

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Store rank, device and precision. Raise if the backend cannot work, before the process group is created.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.

        Raises:
            MisconfigurationException: the backend does not support the device.
        """
        super().connect(world, device, precision)
        backend = self.process_group_backend
        if world.size > 1 and (backend == "nccl" or (device.type == "cuda" and "nccl" in backend)):
            _check_nccl(device.type)
        if world.size > 1 and device.type != "cpu" and not carries(backend, device.type):
            raise MisconfigurationException(
                f"The process group backend {backend!r} does not support tensors on {device.type!r} devices, which "
                f"this run of {world.size} ranks uses. Use devices=1, or pass {type(self).__name__}"
                "(process_group_backend=...) with the backend from the device's package."
            )
        if world.size > 1:
            self._check_reach(backend)

    def setup_environment(self) -> None:
        """Join the process group; create it if there is none.

        Raises:
            MisconfigurationException: a process group of another number of ranks exists already, or its backend does
                not support the device.
            RuntimeError: rank 0 cannot be reached, or not all ranks arrive in time.
        """
        super().setup_environment()
        protect_forks()
        settle_at_exit()
        world = self.world
        if self._nccl is not None:
            text = self._nccl.apply(self.process_group_backend, dist.is_initialized())
            if text is not None:
                rank_zero_info(text)
        if dist.is_initialized():
            self._check_group()
        else:
            # nothing can be lost yet, and the others may be gone; one rank alone may be a notebook's kernel
            with ending_at_once() if world.size > 1 else contextlib.nullcontext():
                self._make_group()
        record_join()
        install_trace()
        if dist.get_world_size() != world.size:
            raise MisconfigurationException(
                f"A process group of {dist.get_world_size()} ranks already exists, but this run has {world.size} "
                "ranks. Pass matching `devices` and `num_nodes` to the Trainer, or let lockstep create the group. To "
                'use different numbers of ranks in one script, use strategy="ddp_spawn", whose ranks end after each '
                "call."
            )
        if self.peers is None and self.replicas.count < world.size:
            self.peers = column_group(self.replicas, self._timeout)
            self.members = group_among(self.replicas.rows, self._timeout)

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Store the optimizers. Raise if a layer's forward changes weights on its rank only (``max_norm``).

        Args:
            optimizers: optimizers of the fit.
            configs: schedulers of the fit, with the interval and frequency of their steps.

        Raises:
            MisconfigurationException: an embedding has ``max_norm``, and there are several replicas.
        """
        for name, layer in self.module.named_modules() if self.replicas.count > 1 else ():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
                about = {"kind": type(layer).__name__, "name": name, "max_norm": layer.max_norm}
                strategy, replicas = type(self).__name__, self.replicas.count
                raise MisconfigurationException(MAX_NORM.format(strategy=strategy, replicas=replicas, **about))
        super().setup_optimizers(optimizers, configs)

    @property
    def process_group_backend(self) -> str:
        """Backend that the user chose; by default gloo for CPU tensors, and torch's default for the device.

        With `CONNECTED` or more ranks, the device's backend sends all messages, unless parameters are on the CPU.
        """
        if self._backend is None and self.drives_all_devices:
            return "gloo"  # one process sends nothing, and NCCL would require a GPU
        if self._backend is not None or self.accelerator_backend:
            return self._backend or self.accelerator_backend
        kind = self.root_device.type
        own = dist.Backend.default_device_backend_map.get(kind, "gloo")
        if own == "gloo":
            return "gloo"
        connects = self.world.size < CONNECTED or self.keeps_parameters_on_cpu
        return f"cpu:gloo,{kind}:{own}" if connects and dist.is_gloo_available() else own

    def _check_reach(self, backends: str) -> None:
        """Raise if this strategy would use operations on CUDA tensors that gloo does not implement.

        Args:
            backends: backends of a process group, as torch writes them.

        Raises:
            MisconfigurationException: gloo does not implement them; the process would be killed by SIGSEGV.
        """
        kind = self.root_device.type
        reaches = kind == "cpu" or self.keeps_parameters_on_cpu or _own(backends, kind) != "gloo"
        # such strategies send parts of parameters or activations, besides all-reduces and broadcasts of whole tensors
        if self.holds_parts and not self.drives_all_devices and not reaches:
            raise MisconfigurationException(
                f"{type(self).__name__} cannot use the process group backend {backends!r}: gloo implements only "
                f"all-reduce and broadcast for tensors on {kind!r} devices. Omit process_group_backend, or create the "
                f'group with torch.distributed.init_process_group("cpu:gloo,{kind}:nccl").'
            )

    def _check_group(self) -> None:
        """Check that a process group that the user's code created supports the tensors of this run.

        Raises:
            MisconfigurationException: it does not support tensors that this strategy sends.
        """
        # "cpu:gloo,cuda:nccl": torch writes the backend of each type of device, also for a single name
        backends, kind = dist.get_backend_config(), self.root_device.type
        carried = [entry.partition(":")[0] for entry in backends.split(",")]
        wanted = backends if kind in carried else self.process_group_backend
        if "cpu" not in carried and "gloo" not in wanted:
            wanted = f"cpu:gloo,{wanted}"
        way_out = f'Create it with torch.distributed.init_process_group("{wanted}"), or let lockstep create it.'
        if kind not in carried and self.world.size > 1:
            raise MisconfigurationException(
                f"The existing process group ({backends}) does not support tensors on {kind!r} devices, which this run "
                f"uses. {way_out}"
            )
        if self.world.size > 1:
            self._check_reach(backends)
        if "cpu" in carried:
            return
        if self.keeps_parameters_on_cpu:
            raise MisconfigurationException(
                f"{type(self).__name__} has parameters on the CPU, but the existing process group ({backends}) does "
                f"not support CPU tensors. {way_out}"
            )
        rank_zero_info(
            f"The existing process group ({backends}) does not support CPU tensors. The device sends small messages "
            f"instead, which is slower, since it waits for each of them. {way_out}"
        )

    @does("joining the other ranks")
    def _make_group(self) -> None:
        # The functions of this module have the default group as a default argument, which is evaluated when it is
        # imported (torch's optimizers import it). If that happens after the group is created, they keep it alive after
        # its destruction: gloo's threads then run into the end of the interpreter, which aborts one process in five.
        import torch.distributed.nn.functional  # noqa: F401

        world, backend = self.world, self.process_group_backend
        if backend == "nccl" and self.root_device.type != "cuda":
            _check_nccl(self.root_device.type)  # `connect` checks it for several ranks only
        choose_gloo_interface(world)
        if world.size > 1 and ("gloo" in backend or "nccl" not in backend):  # NCCL has few connections
            provide_files(world.size)
        # one rank needs no rendezvous, and so no port
        store = dist.HashStore() if world.size == 1 else connect_ranks(world, self._timeout)
        connect_nodes(side(), world, store)
        # without it NCCL connects when it is first used, and once more for each pair that sends and receives
        device = self.root_device if _own(backend, self.root_device.type) in BOUND else None
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=self._timeout, device_id=device, store=store
        )
        EXIT_GROUP.at_exit(_leave_group)
        # if a rank failed before the others have connected to it, their errors would hide its own
        comm.barrier()

    def teardown(self) -> None:
        """Restore NCCL's environment variables, but do not destroy the process group, which the next call can reuse."""
        super().teardown()
        if self._nccl is not None:
            self._nccl.restore()


def _own(backend: str, kind: str) -> str:
    """Return the backend for one device type, from a string such as ``"cpu:gloo,cuda:nccl"`` for several types."""
    return dict(entry.split(":") for entry in backend.split(",")).get(kind, "") if ":" in backend else backend


def _check_nccl(device_type: str) -> None:
    from lockstep.cluster.nccl import check_nccl

    check_nccl(device_type)


def _leave_group() -> None:
    if dist.is_initialized():
        # gloo's threads need the interpreter's lock to release the last collective's tensors. Destroying the group
        # waits for them and holds the lock, so they get a moment first.
        with contextlib.suppress(RuntimeError):  # torch's error about a loader worker that this exit has killed
            settle()
        with contextlib.suppress(RuntimeError):
            if getattr(sys, "last_value", None) is None or not _has_queue():
                dist.destroy_process_group()
            else:  # NCCL would first finish queued collectives, which may wait for a rank that has ended
                dist.distributed_c10d._abort_process_group()


def _has_queue() -> bool:
    """Return True if the process group queues collectives on a device instead of running them immediately."""
    return any(entry.rpartition(":")[2] != "gloo" for entry in dist.get_backend_config().split(","))


# -- arguments of other libraries ------------------------------------------------------------------------------


_DEVICES = "the Trainer assigns a device to each rank; choose devices with Trainer(accelerator=..., devices=...)"
_GROUP = (
    "the process group contains all ranks of the run; to average gradients over a smaller group, write a loop with "
    "lockstep.DistributedDataParallel"
)
_OVERLAP = (
    "an optimizer inside the backward would see gradients before they are clipped and unscaled; use "
    "shard_optimizer=True to divide its work, or write a loop"
)
REFUSED = {
    "accelerator": _DEVICES,
    "parallel_devices": _DEVICES,
    "device_ids": _DEVICES,
    "output_device": _DEVICES,
    "dim": "each rank loads its own batches, so nothing is scattered",
    "process_group": _GROUP,
    "device_mesh": _GROUP,
    "offload_optimizer": 'optimizer states stay on the device of their parameters; use strategy="fsdp_cpu_offload"',
    "mixed_precision": "choose the precision with Trainer(precision=...)",
    "delay_all_reduce_named_params": _OVERLAP,
    "param_to_hook_all_reduce": _OVERLAP,
}
"""Unsupported arguments of Lightning's DDPStrategy and of torch's DistributedDataParallel -> the reason."""

NO_EFFECT = dict.fromkeys(
    ("find_unused_parameters", "skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation")
)
"""DDP arguments without effect: unused parameters are always found, and a bucket's gradients copied together."""

_UNSET = ("broadcast_buffers", "forward_sync_buffers")
_AS_ALWAYS: dict[str, tuple[Any, ...]] = {"dim": (0, None), "offload_optimizer": (False, None)}


def check_others(
    strategy: str, others: Mapping[str, Any], known: Iterable[str], no_effect: Mapping[str, str | None]
) -> None:
    """Raise if extra keyword arguments (``**others``) of a strategy's constructor are unknown or not supported.

    Args:
        strategy: name of the class.
        others: name -> value.
        known: names of the constructor's arguments.
        no_effect: names of arguments without effect -> the reason, which is logged, or None.

    Raises:
        MisconfigurationException: an argument is unknown, or is not supported; names an alternative.
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
            raise MisconfigurationException(f"{start} is not supported: {REFUSED[name]}.")
        near = difflib.get_close_matches(name, [*known, *no_effect], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise MisconfigurationException(f"{start}: {strategy} has no argument {name!r}.{hint}")


def checked_cap(name: str, value: float | None, default: float) -> float:
    """Check a bucket size in MiB, and return it as a float. Return ``default`` if ``value`` is None.

    Raises:
        MisconfigurationException: the value is not a number above 0.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise MisconfigurationException(f"DDPStrategy({name}={value!r}) must be a size in MiB above 0.")
    return float(value)


def checked_caps(name: str, caps: Sequence[float] | None, default: float) -> list[float]:
    """Check bucket sizes in MiB, and return them with ``default`` in place of each None; [] if ``caps`` is None.

    Raises:
        MisconfigurationException: a value is not a number above 0.
    """
    if caps is not None and (isinstance(caps, str) or not isinstance(caps, Sequence)):
        raise MisconfigurationException(
            f"DDPStrategy({name}={caps!r:.100}) must be a list of sizes in MiB above 0, such as [1, 25]."
        )
    return [checked_cap(name, cap, default) for cap in caps or ()]


def check_switches(**switches: object) -> None:
    """Raise an error unless all arguments are True or False, since a string such as "False" would count as True.

    Raises:
        MisconfigurationException: names the argument.
    """
    for name, value in switches.items():
        if value is None and name in _UNSET:
            continue
        if isinstance(value, str) or value not in (False, True):
            raise MisconfigurationException(f"DDPStrategy({name}={value!r:.100}) must be True or False.")


def _checked_backend(strategy: str, backend: str | None) -> str | None:
    """Check a process group backend such as "cpu:gloo,cuda:nccl", and return it in lower case.

    Raises:
        MisconfigurationException: torch does not have it, and no package has registered it.
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
                f"{strategy}(process_group_backend={backend!r:.100}): torch has no such backend. Use one of "
                f"{', '.join(known)}.{hint}"
            )
    return names
