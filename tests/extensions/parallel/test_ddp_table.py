"""docs/ddp.md: its rows name tests that are there, and whatever differs in the signature has a row."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from torch import nn

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.surface.table import is_test

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ddp.md"


def rows() -> list[list[str]]:
    """The cells of all rows."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if row[-1] != "test"]


def test_each_row_names_a_test_that_is_there() -> None:
    assert len(rows()) > 30
    for row in rows():
        assert all(row), row
        assert re.fullmatch(r"`[\w/.]+::\w+`", row[-1]), row
        assert is_test("tests/" + row[-1].strip("`")), row


def test_each_default_that_differs_has_a_row() -> None:
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    differ = {name for name, parameter in theirs.items() if ours[name].default != parameter.default}
    # torch 2.11 and 2.12 have True for broadcast_buffers, which is forward_sync_buffers since
    assert differ - {"broadcast_buffers"} == {"gradient_as_bucket_view"}
    named = {name for row in rows() for name in re.findall(r"`(\w+)`", row[0])}
    assert named >= {*(differ - {"broadcast_buffers"}), "check_reduction", "device_ids", "mixed_precision"}


def test_what_is_ours_alone_is_on_the_page() -> None:
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    methods = {name for name in vars(DistributedDataParallel) if not name.startswith("_")}
    set_there = re.findall(r"\bself\.(\w+)", inspect.getsource(nn.parallel.DistributedDataParallel))
    later = {"batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}  # of torch 2.12, 2.13 and 2.15
    alone = (set(ours) - {*theirs, *later}) | (methods - {*dir(nn.parallel.DistributedDataParallel), *set_there})
    text = PAGE.read_text()
    assert [name for name in sorted(alone - {"reducer"}) if name not in text] == []
