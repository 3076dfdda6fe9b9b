"""Speed and memory of devices and links, measured on this machine and cached in a file, or described by the user."""

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.extensions.balancing.planner.engines import EngineCost, measure_engines
from lockstep.ground.chips import CHIPS, TERA, TFLOAT32
from lockstep.ground.device import device_name, devices_of, synchronize
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import free_memory
from lockstep.ground.transfer import pinned

GB = 10**9
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": GB, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(flag: str, text: str) -> float:
    """Parse a number of bytes such as "80GB", "24 GiB", "25GB/s" or "1000".

    Args:
        flag: name of the option, for the error.
        text: the user's.

    Raises:
        MisconfigurationException: the text cannot be parsed, or is not above 0.

    Example:
        >>> parse_bytes("--memory", "80GB"), parse_bytes("--link", "1.5 GiB/s")
        (80000000000.0, 1610612736.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Z]*)(/S)?", text.strip().upper())
    value = 0.0 if found is None else float(found[1]) * UNITS.get(found[2], 0)
    if value <= 0:
        raise MisconfigurationException(f"{flag} {text}: pass bytes above 0 with a unit: 80GB, 24GiB, 25GB/s")
    return value


@dataclass(frozen=True)
class Hardware:
    """Description of equal devices on equal nodes: their speed, memory and links.

    Attributes:
        devices: number of devices on a node.
        nodes: number of machines.
        memory: bytes of a device that a run can use.
        products: floating-point operations a second of matrix products, by the name of a dtype.
        moved: bytes a second that an operation reads and writes.
        call: minimum seconds of an operation.
        link: bytes a second between devices of a node.
        latency: seconds of a message between devices of a node.
        shared: bytes of gradients a second of an all-reduce in memory that two ranks of one host share; 0: none.
        shared_latency: minimum seconds of such an all-reduce.
        engines: by name, seconds that an engine adds to a step of ranks on one host's CPU.
        contention: factor by which a rank is slower while another rank of its host computes.
        node_link: bytes a second between nodes.
        node_latency: seconds of a message between nodes.
        host_memory: bytes of a node's host, for all its devices.
        host_link: bytes a second between a device and the host.
        host_moved: bytes a second that the host's processor reads and writes.
        overlaps: True if messages are sent while a device computes.
        kind: type of the devices.
        name: name of the device.
        host: the machine on which it was measured; "" for described devices.
    """

    devices: int = 1
    nodes: int = 1
    memory: float = 80 * GB
    products: tuple[tuple[str, float], ...] = (("float32", 100 * TERA), ("bfloat16", 200 * TERA))
    moved: float = 1500 * GB
    call: float = 6e-6
    link: float = 100 * GB
    latency: float = 1e-5
    shared: float = 0.0
    shared_latency: float = 0.0
    engines: tuple[tuple[str, EngineCost], ...] = ()
    contention: float = 1.0
    node_link: float = 25 * GB
    node_latency: float = 2e-5
    host_memory: float = 512 * GB
    host_link: float = 20 * GB
    host_moved: float = 80 * GB
    overlaps: bool = True
    kind: str = "cuda"
    name: str = "a device as described"
    host: str = ""

    @property
    def world(self) -> int:
        """Number of devices of all nodes."""
        return self.devices * self.nodes

    def speed(self, precision: str) -> float:
        """Return the floating-point operations per second of matrix products under ``Trainer(precision=...)``."""
        table = dict(self.products)
        kinds = (("bf16", "bfloat16"), ("16", "float16"), ("64", "float64"))
        wanted = next((dtype for key, dtype in kinds if key in precision), "float32")
        if wanted == "float64":
            return table.get(wanted, table["float32"] / 2)
        return table.get(wanted) or table.get("bfloat16" if wanted == "float16" else "float16") or table["float32"]

    def slowest_link(self) -> tuple[float, float]:
        """Return (bytes per second, latency in seconds) of the slowest link in a ring over all devices."""
        if self.nodes > 1 and self.devices > 1:
            return min(self.link, self.node_link), max(self.latency, self.node_latency)
        return (self.node_link, self.node_latency) if self.nodes > 1 else (self.link, self.latency)


def described(
    devices: int, nodes: int = 1, memory: float | None = None, link: float | None = None, chip: str | None = None
) -> Hardware:
    """Create a `Hardware` from the user's description of a machine, without measurements.

    Args:
        devices: number of devices on a node.
        nodes: number of machines.
        memory: bytes of a device; None: 80 GB.
        link: bytes a second of the slowest link: between nodes, or between devices of a single node.
        chip: name of a GPU, for its arithmetic speed: "H100", "A100", "RTX 3090"; None: a modest one of 2020.

    Raises:
        MisconfigurationException: the chip is unknown.
    """
    made = Hardware(devices, nodes, name="a device as described")
    if memory is not None:
        made = replace(made, memory=memory * 0.92)  # the rest is the driver's, and lost between allocations
    if link is not None:
        made = replace(made, node_link=link) if nodes > 1 else replace(made, link=link)
    if chip is not None:
        table = next((rates for pattern, rates in CHIPS if re.search(pattern, chip.lower())), None)
        if table is None:
            raise MisconfigurationException(
                f"--chip {chip}: unknown. Pass the name of an NVIDIA GPU: H100, A100, L40, RTX 3090"
            )
        # products of real sizes reach about half of the data sheet
        products = {_name(key): rate * TERA * 0.5 for key, rate in table.items()}
        products["float32"] = products.pop(TFLOAT32, products["float32"])
        made = replace(made, products=tuple(products.items()), name=chip)
    return made


def _name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


# -- measured ----------------------------------------------------------------------------------------------------


SMALL = 384
"""Rows of the matrices that are multiplied on a CPU, and of the first ones on other devices."""


def _median(run: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Return the median seconds of ``times`` calls of ``run``, after one warm-up call."""
    run()
    found = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _rate_of_products(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of matrix products in a dtype."""
    # larger matrices use more of a device; a device that is slow in a dtype stops at small ones
    size, most = SMALL, SMALL if device.type == "cpu" else 4096
    while True:
        # random numbers: a GPU multiplies equal numbers faster, since they take less power
        a = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        seconds = _median(partial(torch.mm, a, a), device)
        if size >= most or seconds > 0.01:
            return 2.0 * size**3 / seconds
        size = min(2 * size, most)


def measure_device(device: torch.device) -> Hardware:
    """Measure a device's speed in matrix products, memory traffic and small operations in about a second."""
    on_cpu = device.type == "cpu"
    dtypes = (torch.float32, torch.bfloat16) if on_cpu else (torch.float32, torch.bfloat16, torch.float16)
    products = {_name(dtype): _rate_of_products(device, dtype) for dtype in dtypes}
    wide = torch.ones((16 if on_cpu else 256) * 2**20 // 4, device=device)
    out = torch.empty_like(wide)
    moved = 3 * wide.nbytes / _median(lambda: torch.add(wide, wide, out=out), device)
    small = torch.ones(8, device=device)

    def calls() -> None:
        for _ in range(200):
            small.add_(1.0)

    found = Hardware(
        memory=usable_memory(device),
        products=tuple(products.items()),
        moved=moved,
        call=_median(calls, device) / 200,
        host_memory=usable_memory(torch.device("cpu")),
        overlaps=not on_cpu,
        kind=device.type,
        name=device_name(device),
        host=platform.node(),
    )
    if on_cpu:
        return replace(found, host_link=moved, host_moved=moved)
    source = pinned(torch.empty(64 * 2**20, dtype=torch.uint8), device)
    there = torch.empty_like(source, device=device)
    host_link = source.nbytes / _median(lambda: there.copy_(source, non_blocking=True), device)
    return replace(found, host_link=host_link, link=_link_to_neighbour(device) or host_link / 2)


def _link_to_neighbour(device: torch.device, seconds: float = 60.0) -> float | None:
    """Measure the bytes per second of copies from a device to its neighbor; None without a neighbor or on failure."""
    numbers = [other.index for other in devices_of(device.type)]
    mine = device.index or 0
    if len(numbers) < 2:
        return None
    other = mine + 1 if mine + 1 in numbers else mine - 1
    # in another process, since a process that has opened a device keeps some of its memory until it ends
    code = f"from {__name__} import copying; print(copying({device.type!r}, {mine}, {other}))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def copying(kind: str, one: int, other: int) -> float:
    """Measure the bytes per second of copies between two devices of one type, given their indices."""
    device = torch.device(kind, one)
    source = torch.empty(64 * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=torch.device(kind, other))
    return source.nbytes / _median(lambda: target.copy_(source), device)


def usable_memory(device: torch.device) -> float:
    """Return the number of bytes that a run can use on a device, including unused memory in torch's allocator."""
    free = free_memory(device)
    if free is None:
        return 16 * GB
    return float(free) if device.type == "cpu" else free * 0.95


def _small_step() -> Callable[[], None]:
    """Return a training step of a few milliseconds, whose optimizer update does not fit into a core's cache."""
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(4)])
    optimizer, x = torch.optim.AdamW(net.parameters(), 1e-6), torch.ones(64, 512)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def probe(rank: int, folder: str) -> None:
    """Measure all-reduces, contention and the overhead of engines between two processes, which both call this function.

    Rank 0 writes the results into ``folder``.

    Args:
        rank: 0 or 1.
        folder: folder for the rendezvous and the results.
    """
    from lockstep.engines.ddp.reducer import Reducer

    cpu = torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sent = []
    for count in (1, 2**21):
        values = torch.zeros(count)
        sent.append(_median(lambda v=values: dist.all_reduce(v), cpu, 9))  # type: ignore[misc]
    extra = []
    for width in (8, 1448):
        seconds = []
        for reduced in (False, True):
            layer = torch.nn.Linear(width, width, bias=False)
            reducer = Reducer(layer.named_parameters()) if reduced else None
            x = torch.ones(1, width)

            def step(layer: Any = layer, reducer: Any = reducer, x: Any = x) -> None:
                layer.zero_grad()
                if reducer is not None:
                    reducer.prepare()
                layer(x).sum().backward()
                if reducer is not None:
                    reducer.finish()

            # the reducer lays out its buckets in the first steps
            for _ in range(3):
                step()
            seconds.append(_median(step, cpu, 9))
        extra.append(max(seconds[1] - seconds[0], 1e-6))
    size = 4.0 * 1448 * 1448
    work = _small_step()
    alone = _median(work, cpu, 25) if rank == 0 else 0.0
    dist.barrier()
    together = _median(work, cpu, 25)
    dist.barrier()
    if rank == 0:
        alone = min(alone, _median(work, cpu, 25))
    dist.barrier()
    tiny = torch.zeros(1)

    def work_and_send() -> None:
        work()
        dist.all_reduce(tiny)

    # ranks that compute do not arrive at the same time, so that a message takes longer than between idle ranks
    delay = _median(work_and_send, cpu, 9) - together
    found: dict[str, Any] = {
        "contention": max(together / alone, 1.0) if rank == 0 else 1.0,
        "link": 4 * 2**21 / max(sent[1] - sent[0], 1e-9),  # between two ranks a ring sends each byte once over a link
        "latency": max(sent[0], delay) / 2,
        "shared": size / max(extra[1] - extra[0], 1e-9),
        "shared_latency": extra[0],
    }
    found["engines"] = [(name, asdict(cost)) for name, cost in measure_engines().items()]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_links(seconds: float = 120.0) -> dict[str, Any]:
    """Measure message speed and the overhead of sharded engines between two processes on this host's CPU.

    The measurement takes about 15 seconds.

    Args:
        seconds: time limit.

    Returns:
        fields of `Hardware` by name; empty if the processes fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = f"import sys; from {__name__} import probe; probe(int(sys.argv[1]), sys.argv[2])"
        ranks = []
        for rank in (0, 1):
            # DeepSpeed reads these
            variables = [f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2", "DS_ACCELERATOR=cpu"]
            front = ["env", "GLOO_SOCKET_IFNAME=lo", *variables] if sys.platform == "linux" else []
            words = [*front, sys.executable, "-c", code, str(rank), folder]
            ranks.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            for process in ranks:
                process.wait(seconds)
            return _fields(json.loads(Path(folder, "found.json").read_text()))
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return {}
        finally:
            for process in ranks:
                process.kill()
                process.wait()


# -- kept --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder of cached measurements."""
    return Path.home() / ".cache" / "lockstep"


def hardware_of(device: torch.device, devices: int = 1, nodes: int = 1, folder: Path | None = None) -> Hardware:
    """Return this machine's `Hardware`, measured or from the cache. Only free memory is measured in each call.

    Args:
        device: one of the devices; the others are assumed to be equal.
        devices: number of devices on a node; ranks on a CPU share its memory.
        nodes: number of machines.
        folder: folder of the cache; None: `cache_folder`. A folder that cannot be written to is ignored.
    """
    on_cpu = device.type == "cpu"
    kind = "cpu" if on_cpu else device_name(device)
    name = re.sub(r"\W+", "-", f"{platform.node()}-{kind}-{torch.__version__}-{torch.get_num_threads()}")
    path = (cache_folder() if folder is None else folder) / f"hardware-{name}.json"
    cached = _read(path)
    found = cached or measure_device(device)
    if on_cpu and devices > 1 and not found.engines:
        found = replace(found, **measure_links())
    if found is not cached:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(found), indent=1))
    memory = usable_memory(device) / (devices if on_cpu else 1)
    return replace(found, devices=devices, nodes=nodes, memory=memory)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """Convert JSON values of a `Hardware`'s fields to the types of the fields."""
    made = {name: tuple(map(tuple, value)) if isinstance(value, list) else value for name, value in given.items()}
    return {**made, "engines": tuple((name, EngineCost(**cost)) for name, cost in made.get("engines", ()))}


def _read(path: Path) -> Hardware | None:
    try:
        return Hardware(**_fields(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, KeyError):
        return None
