"""What pages say of devices is held to the README's table "Where it has run": nothing works where nothing ran."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.ground.torch_support import TESTED_ON, TESTED_ON_SEVERAL

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = "README.md#where-it-has-run"
NOT_YET = "not yet"

NAMES = r"GPUs?|CUDA|NCCL|TPUs?|torch_tpu|MPS|Apple|XPU|Intel"
ROWS = {
    "cuda": ("one GPU", r"GPUs?|CUDA"),
    "nccl": ("NCCL on several GPUs of a host", "NCCL"),
    "tpu": ("one TPU", r"TPUs?|torch_tpu"),
    "mps": ("one MPS (Apple's GPU)", "MPS|Apple"),
    "xpu": ("one XPU (Intel's GPU)", "XPU|Intel"),
}
"""Kind of device -> its row of the table, and the words for it on pages."""

PROMISES = (
    rf"\b(?:works?|runs?|tested|tried|supported|supports|trains?)\b(?P<between>[^.;:|]*?)\b(?:{NAMES})\b",
    rf"\bfor Linux\b(?P<between>[^.;:|]*?)\b(?:{NAMES})\b",
)
"""How a sentence says that something works on a device."""
DENIALS = re.compile(
    r"\b(?:not|no|never|nothing|untried|refused?|refuses|without|fails?|written for|where|if|whether|script|code|when"
    r"|instead|alone|anywhere|needs?|while|until|processes)\b"
)
"""What makes it another sentence: one of what does not work, or of when something happens."""
SELF_MADE = re.compile(r"\A# [^\n]*\n\n(?:[^\n]*\n)?[^\n]*[Ww]ritten by `python ")


def table() -> dict[str, str]:
    """First cell -> second cell."""
    part = (ROOT / "README.md").read_text().partition("## Where it has run\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    assert all(len(row) == 2 for row in rows), rows
    return {row[0]: row[1] for row in rows[2:]}


def promises(text: str) -> list[str]:
    """The sentences, or parts of them, that say of a device that something works there."""
    flat = re.sub(r"\s+", " ", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    found = [match for promise in PROMISES for match in re.finditer(promise, flat)]
    return [
        match[0]
        for match in found
        if not DENIALS.search(match["between"])
        and not re.search(r"\b(?:not|never|nothing|cannot)\b[^.;:|]*\Z", flat[: match.start()])
    ]


def unfounded(text: str, rows: dict[str, str]) -> list[str]:
    """The promises for whose device the table has no row that says when it ran."""
    return [
        said
        for said in promises(text)
        if any(re.search(rf"\b(?:{words})\b", said) and rows[row] == NOT_YET for row, words in ROWS.values())
    ]


def test_the_table_has_a_row_for_each_kind_of_place() -> None:
    rows = table()
    assert {row for row, _ in ROWS.values()} <= rows.keys()
    assert {"several processes on one GPU", "NCCL between hosts"} <= rows.keys()
    for where, when in rows.items():
        assert when == NOT_YET or re.search(r"each day|\d{4}-\d\d-\d\d.*torch \d.*commit [0-9a-f]{7}", when), where


def test_runs_on_devices_of_the_table_say_nothing_at_their_start() -> None:
    """`lockstep.ground.torch_support.TESTED_ON` goes with the table: write a kind there when its row gets a date."""
    rows = table()
    ran = {kind for kind, (row, _) in ROWS.items() if kind != "nccl" and rows[row] != NOT_YET}
    assert {*TESTED_ON} == {"cpu", *ran}
    assert ("cuda" in TESTED_ON_SEVERAL) == (rows[ROWS["nccl"][0]] != NOT_YET)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_page_promises_what_has_not_run(page: Path) -> None:
    assert unfounded(page.read_text(), table()) == []


OF_OTHERS = ("peers.md", "verify-audit.md")
"""Pages that name devices because other libraries do."""


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda path: path.name)
def test_pages_that_speak_of_devices_refer_to_the_table(page: Path) -> None:
    text = page.read_text()
    if not SELF_MADE.search(text) and re.search(rf"\b(?:{NAMES})\b", text) and page.name not in OF_OTHERS:
        assert LINK in text


@pytest.mark.parametrize(
    "said",
    [
        "It works on GPUs (NCCL) and on CPUs (gloo), with torch 2.13.",
        "It works on GPUs (NCCL) and on\nCPUs (gloo).",
        "Each of them works on CPUs (gloo) as on GPUs (NCCL) unless it says otherwise",
        "All of them work on gloo and NCCL, and leave every rank with the same bits.",
        "It is for Linux, on CPUs and NVIDIA GPUs.",
        "This is tested on a Mac's MPS.",
        "It runs fast on TPUs.",
    ],
)
def test_a_promise_is_found(said: str) -> None:
    assert unfounded(said, dict.fromkeys(table(), NOT_YET))
    assert not unfounded(said, dict.fromkeys(table(), "2030-01-01, torch 2.20, commit 0123abc"))


@pytest.mark.parametrize(
    "said",
    ["It has not run on GPUs.", "It works on CPUs (gloo). GPUs are not tried.", "A script for GPUs runs on the CPU."],
)
def test_what_is_no_promise_is_left_alone(said: str) -> None:
    assert not unfounded(said, dict.fromkeys(table(), NOT_YET))
