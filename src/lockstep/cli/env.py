"""``lockstep env``: show versions, devices, the cluster and why it was detected, and lockstep's variables."""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import TypedDict

import torch

from lockstep.cli.run import CommandParser
from lockstep.cluster.detect import explained
from lockstep.ground.accelerators import CUDAAccelerator
from lockstep.ground.device import accelerator_kinds, device_name, devices_of
from lockstep.ground.memory_use import total_memory
from lockstep.launch.environment import cores, variables_in_use

ABOUT = """\
Show what a run depends on: versions, devices, the cluster that started this process, its rank, and the variables that
lockstep reads. The output can be published: values that look like keys or tokens are not shown, host and user names are
omitted, and paths are shortened. Start the command as the script is started (`srun lockstep env`) to see a rank's view.
"""

# names of distributions, not of modules; a test compares them with pyproject.toml
REQUIRED = ("torch", "cloudpickle", "numpy", "tqdm", "typing-extensions")
OPTIONAL = (
    *("alembic", "deepspeed", "jsonargparse", "matplotlib", "mlflow-skinny", "onnx", "onnxscript", "optuna", "peft"),
    *("psutil", "pyyaml", "rich", "safetensors", "sqlalchemy", "tensorboard", "torchmetrics", "transformers", "wandb"),
)
IF_INSTALLED = ("lightning", "pytorch-lightning", "mlflow")
"""Distributions that no extra needs, shown only if they are installed."""


class Report(TypedDict):
    """The facts that ``lockstep env`` shows, as plain values."""

    versions: dict[str, str]
    required: dict[str, str | None]  #: None: not installed
    optional: dict[str, str | None]  #: None: not installed
    devices: dict[str, str]
    cluster: str | None
    why: str
    rank: dict[str, int | str] | None  #: None: a Trainer could not start here, for the reason in `why`
    variables: dict[str, str]


def env(words: Sequence[str]) -> int:
    """Run ``lockstep env`` and return its exit code.

    Args:
        words: arguments that follow ``lockstep env``.

    Raises:
        MisconfigurationException: an unknown argument.
    """
    parser = CommandParser("lockstep env", None, ABOUT)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--full", action="store_true", help="print names of hosts and users, and full paths")
    given, found = parser.parse_args(words), report()
    if not given.full:
        found = without_names(found)
    print(json.dumps(found, indent=2) if given.json else "\n".join(_lines(found)))
    return 0


def report() -> Report:
    """Collect the versions, the devices, the cluster and the environment variables of this process."""
    finding = explained()
    world = finding.world
    return {
        "versions": {
            "lockstep": _version("torch-lockstep") or "not installed, run from its source",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "required": {name: _version(name) for name in REQUIRED},
        "optional": {name: _version(name) for name in OPTIONAL}
        | {name: found for name in IF_INSTALLED if (found := _version(name)) is not None},
        "devices": dict(_devices()),
        "cluster": finding.cluster,
        "why": finding.why,
        "rank": None
        if world is None
        else {
            "rank": world.rank,
            "world_size": world.size,
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "node_rank": world.node_rank,
            "num_nodes": world.num_nodes,
            "address": world.address,
            "port": world.port,
        },
        "variables": variables_in_use(),
    }


def without_names(found: Report) -> Report:
    """Remove the names of hosts and users from a report, and shorten paths, so that it can be published.

    Example:
        >>> shortened("/home/ada/runs/first on node7", {"node7": "HOST"})
        '.../first on HOST'
    """
    rank = found["rank"]
    names = {socket.gethostname(): "HOST", socket.gethostname().partition(".")[0]: "HOST", getpass.getuser(): "USER"}
    if rank is not None and rank["address"] not in ("127.0.0.1", "localhost"):
        names[str(rank["address"])] = "HOST"
    variables = {
        name: "(omitted: host names)" if re.search("LIST|HOSTS|_NODE$", name) else shortened(value, names)
        for name, value in found["variables"].items()
    }
    return {
        **found,
        "why": shortened(found["why"], names),
        "rank": rank if rank is None else {**rank, "address": shortened(str(rank["address"]), names)},
        "variables": variables,
    }


def shortened(text: str, names: Mapping[str, str]) -> str:
    """Replace the words in ``names`` by their values, and shorten each absolute path to its last part."""
    text = re.sub(r"(?<![\w.])(?:/[\w.@%+~-]+)+/([\w.@%+~-]+)", r".../\1", text)
    for name, instead in names.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text) if name else text
    return text


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[tuple[str, str]]:
    # the cores that a cgroup or an affinity mask leaves, which may be fewer than the machine's
    yield "cpu", f"{cores()} core(s) for this process, {torch.get_num_threads()} thread(s) of torch"
    built = "torch is built without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    if not CUDAAccelerator.is_available():
        yield "cuda", "none; " + (built if torch.version.cuda is None else f"torch is built for {built}")
    for device in (device for kind in accelerator_kinds() for device in devices_of(kind)):
        memory = total_memory(device)
        facts = [device_name(device)] if memory is None else [device_name(device), f"{memory / 2**30:.1f} GiB"]
        yield str(device), ", ".join(facts) + (f"; {built}" if device.type == "cuda" else "")


def _lines(found: Report) -> Iterator[str]:
    required = {name: version or f"MISSING: pip install {name}" for name, version in found["required"].items()}
    optional = {name: version or "not installed" for name, version in found["optional"].items()}
    parts: tuple[tuple[str, dict[str, str]], ...] = (
        ("versions", found["versions"]),
        ("required packages", required),
        ("optional packages", optional),
        ("devices", found["devices"]),
    )
    for title, rows in parts:
        yield f"{title}:"
        width = max(map(len, rows))
        yield from (f"  {name:<{width}}  {value}" for name, value in rows.items())
    yield f"cluster: {found['cluster'] or 'none'}"
    yield f"  {found['why']}"
    rank = found["rank"]
    if rank is not None:
        yield (
            f"rank: {rank['rank']} of {rank['world_size']}; {rank['local_rank']} of {rank['local_size']} on its node; "
            f"node {rank['node_rank']} of {rank['num_nodes']}"
        )
        if rank["world_size"] != 1:
            yield f"  rendezvous of the ranks: {rank['address']}, port {rank['port']}"
    yield "variables in force:" if found["variables"] else "variables in force: none"
    yield from (f"  {name}={value}" for name, value in found["variables"].items())
