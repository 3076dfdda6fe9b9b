"""Figures as Markdown tables, each with what is promised, and as a picture."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from . import cost
from .methods import FEEDBACK, NO_FEEDBACK, NONE, TORCH
from .pairs import Interval, ratios

TCP = {"tower": "MLP, 200 tensors, 1.7 M", "middle:4": "GPT, 5 M", "large:1": "GPT, 25 M"}
SHARED = {"middle:8": "GPT, 5 M, 512 bytes a rank", "tower": "MLP, 200 tensors"}
DP = {"middle:8": "GPT, 5 M, 512 bytes a rank"}
Found = dict[str, Any]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _times(seconds: list[float]) -> str:
    """Median and minimum, in milliseconds."""
    return f"{median(seconds) * 1e3:.1f} / {min(seconds) * 1e3:.1f}"


def _verdict(value: Interval | float, limit: float) -> str:
    upper = value.high if isinstance(value, Interval) else value
    return "yes" if upper <= limit else "**no**"


def of_cost(found: Found) -> list[str]:
    """Microseconds a tensor."""
    rounds = found["rounds"]
    rows = []
    for kind, limit in ((cost.REDUCER, 2.0), (cost.STATIC, 0.7), (cost.WHOLE, 0.0), (cost.WHOLE_STATIC, 0.0)):
        forward = not limit
        python, python_least = cost.a_tensor(rounds, kind, cost.ADDED, forward)
        whole, whole_least = cost.a_tensor(rounds, kind, cost.PLAIN, forward)
        kept = _verdict(python.median, limit) if limit else ""
        promised = f"≤ {limit:g}" if limit else ""
        rows.append(
            [kind, f"{python:.2f}", f"{python_least:.2f}", f"{whole:.2f}", f"{whole_least:.2f}", promised, kept]
        )
    count = len(rounds[cost.PLAIN])
    base = min(seconds[0] for seconds in rounds[cost.PLAIN]) * 1e6 / cost.TENSORS
    head = [
        f"µs a tensor, {count} pairs",
        "over a backward into existing gradients",
        "of minima",
        "over a plain backward",
        "of minima",
        "promised",
        "kept",
    ]
    about = (
        f"Without a reducer, zero_grad and backward take {base:.1f} µs a tensor. The rows of the container include the "
        "forward."
    )
    return [*_table(head, rows), "", about]


def of_tcp(found: Found) -> list[str]:
    """Ours over torch's."""
    rows = []
    for name, label in TCP.items():
        times = found[name]
        views = ratios(times["lockstep, TCP"], times["torch, views"])
        default = ratios(times["lockstep, TCP"], times["torch"])
        pairs = str(len(times["torch"]))
        cells = [_times(times[kind]) for kind in ("lockstep, TCP", "torch, views", "torch")]
        rows.append([label, pairs, *cells, f"{views:.3f}", f"{default:.3f}", "≤ 1.03", _verdict(views, 1.03)])
    head = ["TCP, ms median / minimum", "pairs", "lockstep", "torch, views", "torch, default"]
    return _table([*head, "lockstep / torch, views", "lockstep / torch, default", "promised", "kept"], rows)


def of_shared(found: Found) -> list[str]:
    """A step over a local one."""
    rows = []
    for name, label in SHARED.items():
        times = found[name]
        for kind in ("lockstep, shared", "lockstep, shared, static", "torch, views"):
            ratio = ratios(times[kind], times["local"])
            limited = kind == "lockstep, shared" and name != "tower"
            promised, kept = ("≤ 1.08", _verdict(ratio.median, 1.08)) if limited else ("", "")
            pairs = str(len(times[kind]))
            rows.append(
                [label, kind, pairs, _times(times[kind]), _times(times["local"]), f"{ratio:.3f}", promised, kept]
            )
    head = ["shared memory, ms median / minimum", "", "pairs", "step", "local step", "ratio", "promised", "kept"]
    return _table(head, rows)


def of_dp(found: Found) -> list[str]:
    """Threads beside processes."""
    rows = []
    for name, label in DP.items():
        times = found[name]
        ratio = ratios(times["dp"], times["lockstep, shared"])
        cells = [_times(times["dp"]), _times(times["lockstep, shared"])]
        rows.append([label, str(len(times["dp"])), *cells, f"{ratio:.3f}"])
    return _table(
        ["same global batch, ms median / minimum", "pairs", "dp, 2 threads", "ddp, 2 processes", "ratio"], rows
    )


def of_bits(found: Found) -> list[str]:
    """Equal or not."""
    rows = []
    for label, (different, total) in found.items():
        world, kind = label.split(" ", 1)
        promised = world == "2" or kind.startswith("laid out")
        verdict = "equal" if different == 0 else "**no**" if promised else "not promised"
        rows.append([world, kind, f"{different} of {total}", verdict])
    return _table(["ranks", "lockstep's engine", "elements that differ from torch's", "promised: equal"], rows)


def of_wire(found: Found) -> list[str]:
    """Bytes a step."""
    plain = found[NONE]["bytes"]
    promised = {"fp16": "1/2", "bf16": "1/2"}
    rows = []
    for hook, sent in found.items():
        expected = promised.get(hook, "")
        if hook == FEEDBACK:
            expected = f"{sent['low rank'] / sent['parameters']:.4f}: (m + n) r / (m n)"
        cells = [f"{sent['bytes'] / 1e6:.3f}", f"{sent['calls']:g}", f"{sent['bytes'] / plain:.4f}", expected]
        rows.append([hook, *cells])
    return _table(["GPT, 5 M", "MB sent by a rank in a step", "messages", "MB / MB of plain", "promised"], rows)


def of_memory(found: Found) -> list[str]:
    """Bytes kept."""
    rows = []
    for label, kept in found.items():
        cells = [f"{kept[name] / 1e6:.2f}" for name in ("parameters", "gradients and buckets", "hook")]
        over = (kept["gradients and buckets"] + kept["hook"]) / kept["parameters"]
        rows.append([label, *cells, f"{over:.2f}"])
    head = [
        "GPT, 5 M",
        "parameters, MB",
        "gradients and buckets, MB",
        "hook's state, MB",
        "gradients, buckets and state / parameters",
    ]
    return _table(head, rows)


def of_link(found: Found) -> list[str]:
    """Steps and losses in the same time."""
    if "left out" in found:
        return [f"Left out: {found['left out']}."]
    base = found[TORCH]
    base_speed, base_loss = base["steps"] / base["seconds"], base["curve"][-1][2]
    rows = []
    for name, run in found.items():
        speed, loss = run["steps"] / run["seconds"], run["curve"][-1][2]
        cells = [f"{run['seconds']:.0f}", str(run["steps"]), f"{speed:.2f}", f"{speed / base_speed:.1f}"]
        rows.append([name, *cells, f"{run['sent'] / 1e6:.2f}", f"{loss:.3f}"])
    good = [run for name, run in found.items() if name != TORCH and run["curve"][-1][2] <= base_loss]
    best = max((run["steps"] / run["seconds"] / base_speed for run in good), default=0.0)
    head = ["100 Mbit/s", "seconds", "steps", "steps a second", "times torch's", "MB sent a step", "loss, held out"]
    kept = "yes" if best >= 5 else "**no**"
    about = (
        "Promised: the best method runs at least 5 times as many steps as torch's DDP, with no higher loss; measured: "
        f"{best:.1f} times. Kept: {kept}."
    )
    return [*_table(head, rows), "", about]


def of_powersgd(found: Found) -> list[str]:
    """Losses after the same steps."""
    losses = found["losses"]
    plain, tail = losses[NONE]
    rows = []
    for name, (held_out, last) in losses.items():
        off = held_out / plain - 1
        promised, kept = "", ""
        if name == FEEDBACK:
            promised, kept = "≤ +2 %", "yes" if off <= 0.02 else "**no**"
        elif name == NO_FEEDBACK:
            promised, kept = "≥ +4 %", "yes" if off >= 0.04 else "**no**"
        rows.append([name, f"{held_out:.4f}", f"{off:+.2%}", f"{last:.4f}", f"{last / tail - 1:+.2%}", promised, kept])
    head = [f"{found['steps']} steps", "loss, held out", "", "loss, last tenth of training", "", "promised", "kept"]
    return _table(head, rows)


def of_gpu(found: Found) -> list[str]:
    """On a GPU, over a step without a container."""
    rows = []
    for label, times in found.items():
        for kind in times:
            ratio = ratios(times[kind], times["local"])
            rows.append([label, kind, str(len(times[kind])), _times(times[kind]), f"{ratio:.3f}"])
    return _table(["GPU, GPT, 25 M", "", "pairs", "ms median / minimum", "over the local step"], rows)


SECTIONS: dict[str, tuple[str, str, Callable[[Found], list[str]]]] = {
    "cost": (
        "Overhead of the reducer",
        "The reducer is the object that reduces gradients. The table shows the CPU time that it adds to zero_grad and "
        "backward of 200 small tensors, in one process that sends nothing. From each time, the time of a backward "
        "without a reducer is subtracted, which either writes new gradients (“plain backward”) or adds to existing "
        "ones. A value is the median of the differences. “Of minima” is the difference of the smallest times instead.",
        of_cost,
    ),
    "tcp": (
        "Over TCP",
        "The table shows the time of a step (zero_grad, forward, backward, SGD) on two ranks, with gloo on the "
        "loopback device. “Views” is torch's class with `gradient_as_bucket_view=True`.",
        of_tcp,
    ),
    "shared": (
        "Through shared memory",
        "The steps are the same as over TCP. A ratio is the time of a step, divided by the time of a step without "
        "reduction (a local step) in the same round. The time of the slower rank is used.",
        of_shared,
    ),
    "bits": (
        "Equal bits",
        "Gradients of several steps are compared with those of torch's class. With three or more ranks, gloo's sums "
        "depend on the layout of the buckets. In the rows “laid out”, lockstep's buckets have the layout of torch's.",
        of_bits,
    ),
    "wire": (
        "Bytes sent",
        "The bytes are counted in the calls of `torch.distributed`, as a ring of two ranks would send them.",
        of_wire,
    ),
    "memory": ("Memory", "The table shows the bytes of all tensors after a step.", of_memory),
    "dp": (
        "dp compared with ddp",
        "One process with two devices (here the CPU twice) is compared with two processes.",
        of_dp,
    ),
    "link": (
        "Slow network",
        "A GPT of 5 M parameters (0.9 M with --quick) is trained by AdamW with each method for the same time. Two "
        "network namespaces are joined by a virtual cable of 100 Mbit/s. Local SGD and DiLoCo average the "
        "weights every 16 steps. Bytes are counted at the network interface, with headers.",
        of_link,
    ),
    "powersgd": (
        "Loss with PowerSGD",
        "A small GPT is trained by SGD with momentum on two ranks. The first two steps do not compress gradients.",
        of_powersgd,
    ),
    "gpu": ("On a GPU", "NCCL with one rank, and two ranks on one card over gloo.", of_gpu),
}


def section(name: str, figures: Found) -> str:
    """One part's heading, explanation, table and load."""
    title, about, lines = SECTIONS[name]
    load = " and ".join(f"{value:.1f}" for value in figures["load"])
    return "\n".join(
        [f"## {title}", "", about, "", *lines(figures["found"]), "", f"Load average before and after: {load}.", ""]
    )


def write(figures: Found, folder: Path, command: str) -> None:
    """docs/ddp-speed.md and the picture."""
    parts = [section(name, figures[name]) for name in SECTIONS if name in figures]
    about = f"""# Speed of DDP

This page compares lockstep's DDP engine with torch's, in time, bytes and memory, for users who choose between them.
Written by {command}.

Times are paired: each round runs every method once. All ranks start a method at the same time. The order of the
methods differs between rounds. A ratio is the median of the rounds' ratios, with the bounds of its 90 % interval (order
statistics) in brackets.

Ranks are processes on one machine with one computing thread each. A bucket is a flat buffer with the
gradients of several parameters. "Promised" is the limit that lockstep aims for. Each section ends with the load
average at its start and end.

![Ratios, and loss over time](ddp-speed.png)
"""
    (folder / "ddp-speed.md").write_text("\n".join([about, *parts]))
    draw(figures, folder / "ddp-speed.png")


def draw(figures: Found, path: Path) -> None:
    """Ratios with their intervals and limits; the loss over time on the slow link."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _draw_ratios(left, figures)
    _draw_link(right, figures["link"]["found"])
    figure.savefig(path, dpi=150)


def _draw_ratios(axes: Any, figures: Found) -> None:
    bars = []
    for name, label in TCP.items():
        times = figures["tcp"]["found"][name]
        bars.append((f"TCP / torch's, {label}", ratios(times["lockstep, TCP"], times["torch, views"]), 1.03, "#1b7837"))
    for name, label in SHARED.items():
        times = figures["shared"]["found"][name]
        limit = 1.08 if name != "tower" else None
        bars.append((f"shared / local, {label}", ratios(times["lockstep, shared"], times["local"]), limit, "#1b7837"))
        bars.append((f"torch's / local, {label}", ratios(times["torch, views"], times["local"]), None, "#888888"))
    for place, (_, found, limit, colour) in enumerate(bars):
        off = [[found.median - found.low], [found.high - found.median]]
        axes.errorbar([found.median], [place], xerr=off, fmt="o", color=colour, capsize=4)
        if limit is not None:
            axes.plot([limit, limit], [place - 0.35, place + 0.35], color="#c0392b")
    axes.axvline(1, color="#cccccc", zorder=0)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ratio of step times, median and 90 % interval (red: promised)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_link(axes: Any, found: Found) -> None:
    if "left out" in found:
        axes.text(0.5, 0.5, f"slow network left out:\n{found['left out']}", ha="center", wrap=True)
        axes.set_axis_off()
        return
    for name, run in found.items():
        times = [seconds for seconds, _, _ in run["curve"]]
        losses = [loss for _, _, loss in run["curve"]]
        speed = run["steps"] / run["seconds"]
        style = {"color": "black", "linewidth": 2.5} if name == TORCH else {}
        axes.plot(times, losses, label=f"{name}: {speed:.1f} steps/s", **style)
    axes.set_xlabel("seconds, over 100 Mbit/s")
    axes.set_ylabel("loss on held-out text, nats a byte")
    axes.set_ylim(top=min(4.5, max(run["curve"][0][2] for run in found.values())))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
