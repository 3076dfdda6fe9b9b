"""The table of torch's own tests of DistributedDataParallel: torch's class beside ours, and why where they differ.

``python -m tests.extensions.parallel.peers.table`` writes docs/peers.md from ``verdicts.json`` and ``reasons.json``.
"""

from __future__ import annotations

from pathlib import Path

from tests.extensions.parallel.peers.record import reasons, recorded

PAGE = Path(__file__).parents[4] / "docs" / "peers.md"
KINDS = {
    "unused": "for the error about unused parameters, which need no flag here",
    "private": "for private methods and objects that belong to torch's reducer",
    "log": "for torch's log of the container, or the profiler's events of its reducer",
    "refused": "for what is refused here, with an error that says what to do",
    "wording": "for an error in torch's words; it is raised in ours, and the rest of the test passes",
    "differs": "for a difference",
}
"""Why a test that torch's class passes is not passed by ours."""


def page() -> str:
    """The page as Markdown."""
    record, why = recorded(), reasons()
    tests = record["tests"]
    theirs = [test for test, row in tests.items() if row["torch"] == "passes"]
    ours = [test for test in theirs if tests[test]["lockstep"] == "passes"]
    tcp = [test for test in theirs if tests[test]["over TCP"] == "passes"]
    worded = [test for test in theirs if tests[test].get("own words") == "passes"]
    beyond = [test for test, row in tests.items() if row["lockstep"] == "passes" and test not in theirs]
    listed = [test for test in theirs if test not in ours]
    kinds = [why[test]["kind"] for test in listed]
    tally = (
        f"Of these ours passes {len(ours)} ({len(tcp)} over TCP), {len(worded)} more but for the wording of an error,"
    )
    lines = [
        "# torch's tests of DistributedDataParallel, with ours in its place",
        "",
        f"The tests in torch {record['torch']} that make a DistributedDataParallel, run as they are: those of",
        "`torch/testing/_internal/distributed/distributed_test.py` on two gloo ranks, and those of",
        "`ddp_under_dist_autograd_test.py` beside it on four, or six, that also call each other (RPC).",
        "They are written for GPUs: their calls on devices are mapped to the CPU from outside",
        "(`tests/extensions/parallel/peers/mapping.py`), decorators that skip are taken off, and `nn.SyncBatchNorm`,",
        "for GPUs only in torch, is lockstep's. *Ours* is `lockstep`'s DistributedDataParallel as it comes (gradients",
        "through shared memory), *over TCP* the same with `shared_memory=False`.",
        "Written by `python -m tests.extensions.parallel.peers.table` from what",
        "`python -m tests.extensions.parallel.peers.record` has found;",
        "`pytest -m slow tests/extensions/parallel/peers` runs it all again, the everyday suite a part.",
        "",
        f"Of {len(tests)} tests torch's class passes {len(theirs)}.",
        tally,
        f"and {len(beyond)} that torch's does not. Of the {len(listed)} that it does not pass",
        "",
        *(f"- {count} {text}" for kind, text in KINDS.items() if (count := kinds.count(kind))),
        "",
        "| test | torch | ours | over TCP | reason |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(test, tests[test], why[test]) for test in tests if test in why]
    lines += ["", "## Passed by both, over TCP too", ""]
    lines += [f"- `{test}`" for test in tests if test not in why]
    return "\n".join(lines) + "\n"


def _line(test: str, row: dict[str, str], said: dict[str, str]) -> str:
    theirs, ours = said.get("torch", ""), said.get("ours", "") or said.get("own words", "")
    parts = [theirs] if theirs == ours else [text for text in (theirs and f"torch's {theirs}", ours) if text]
    words = {name: row[name] for name in ("torch", "lockstep", "over TCP")}
    if row.get("own words") == "passes":
        words["lockstep"] = words["over TCP"] = "passes but for the wording"
    return f"| `{test}` | {words['torch']} | {words['lockstep']} | {words['over TCP']} | {'; '.join(parts)} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
