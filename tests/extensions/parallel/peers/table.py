"""The page of torch's own tests of DistributedDataParallel: results of torch's class and ours, and why they differ.

``python -m tests.extensions.parallel.peers.table`` writes docs/peers.md from ``verdicts.json`` and ``reasons.json``.
"""

from __future__ import annotations

from pathlib import Path

from tests.extensions.parallel.peers.record import reasons, recorded

PAGE = Path(__file__).parents[4] / "docs" / "peers.md"
KINDS = {
    "unused": "the test expects the error about unused parameters, which lockstep does not raise",
    "private": "the test uses private methods and objects of torch's reducer",
    "log": "the test reads the log of torch's class, or the events of its reducer in the profiler",
    "refused": "the test uses features that lockstep refuses with a suggestion",
    "wording": "the test expects the words of torch's error; lockstep's error has other words, and the rest passes",
    "differs": "other",
}
"""Why a test that torch's class passes is not passed by ours."""


def page() -> str:
    """The page as Markdown."""
    record, why = recorded(), reasons()
    tests = record["tests"]
    theirs = [test for test, row in tests.items() if row["torch"] == "passes"]
    ours = [test for test in theirs if tests[test]["lockstep"] == "passes"]
    tcp = [test for test in theirs if tests[test]["over TCP"] == "passes"]
    beyond = [test for test, row in tests.items() if row["lockstep"] == "passes" and test not in theirs]
    listed = [test for test in theirs if test not in ours]
    kinds = [why[test]["kind"] for test in listed]
    lines = [
        "# Compatibility with torch's DistributedDataParallel",
        "",
        "This page lists which of torch's own tests of DistributedDataParallel pass with lockstep's class, for users",
        "who replace torch's class.",
        "",
        f"There are {len(tests)} tests. Torch's class passes {len(theirs)}. Lockstep's class passes {len(ours)} of",
        f"these ({len(tcp)} over TCP), and {len(beyond)} that torch's class does not pass. The other {len(listed)}",
        f"of the {len(theirs)} tests fail with lockstep's class, for these reasons (with the number of tests):",
        "",
        *(f"- {text}: {count}" for kind, text in KINDS.items() if (count := kinds.count(kind))),
        "",
        "The column *ours* is lockstep's class with shared memory for gradients, the default. The column *over TCP* is",
        "lockstep's class with `shared_memory=False`.",
        "",
        "## Tests that differ",
        "",
        "| test | torch | ours | over TCP | reason |",
        "|---|---|---|---|---|",
    ]
    lines += [_line(test, tests[test], why[test]) for test in tests if test in why]
    lines += ["", "## Tests that both pass", ""]
    lines += [f"- `{test}`" for test in tests if test not in why]
    lines += [
        "",
        "## How the tests are run",
        "",
        f"The tests are those of torch {record['torch']} that create a DistributedDataParallel, unchanged:",
        "`torch/testing/_internal/distributed/distributed_test.py` on two gloo ranks, and",
        "`ddp_under_dist_autograd_test.py` on four or six ranks that also use RPC. The tests are written for GPUs. So",
        "calls on devices are mapped to the CPU (`tests/extensions/parallel/peers/mapping.py`), and skip decorators",
        "are removed. `nn.SyncBatchNorm`, which torch has for GPUs only, is replaced by lockstep's.",
        "",
        "`python -m tests.extensions.parallel.peers.record` records the results,",
        "`python -m tests.extensions.parallel.peers.table` writes this page, and",
        "`pytest -m slow tests/extensions/parallel/peers` runs all tests again; the everyday suite runs a part.",
    ]
    return "\n".join(lines) + "\n"


def _line(test: str, row: dict[str, str], said: dict[str, str]) -> str:
    theirs, ours = said.get("torch", ""), said.get("ours", "") or said.get("own words", "")
    both = bool(theirs and ours)
    parts = [theirs and f"torch's class {theirs}", f"the test {ours}" if both else ours]
    parts = [theirs] if theirs == ours else [text for text in parts if text]
    words = {name: row[name] for name in ("torch", "lockstep", "over TCP")}
    if row.get("own words") == "passes":
        words["lockstep"] = words["over TCP"] = "passes except for the wording"
    return f"| `{test}` | {words['torch']} | {words['lockstep']} | {words['over TCP']} | {'; '.join(parts)} |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
