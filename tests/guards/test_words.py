"""Words that were given up for the field's do not come back as names; what replaced each is in the table.

A word that is no ordinary one of English or Python is not to be part of any name. One that is may name a variable, but
no file, folder or class: those are the words that a reader learns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guards.source import Sources, house, read

# word -> what stands in its place. Not to be in any name.
NOWHERE = {
    "attendance": "rank_status",
    "bond": "parent_death",
    "borrowed": "padding_batch",
    "concluded": "final_cause",
    "feeding": "feed",
    "grouping": "WindowPlan",
    "handover": "spawn_results",
    "heed": "signals",
    "ledger": "collective_trace",
    "lookout": "hang_monitor",
    "newcomer": "late_parameters",
    "newcomers": "late_parameters",
    "parcel": "serialization",
    "put_up": "install",
    "rollcall": "desync_check",
    "sight": "RankSnapshot",
    "sights": "RankSnapshot",
    "sparing": "skip_unused",
    "stray": "Divergence, on_unprepared_grad",
    "told_by": "set_location",
}
# The same, of words that are ordinary ones, too: not to be the name of a file, a folder or a class.
NO_CONCEPT = {
    "agreement": "ConsensusFlags",
    "apart": "diverged_weights",
    "arrival": "prefetch_wait",
    "chart": "BatchCounting",
    "children": "processes",
    "chosen": "loader_adapter",
    "course": "BatchCounting",
    "creation": "init_context",
    "draft": "SourceSpec",
    "facts": "logging_data",
    "gate": "collective_trace",
    "interrupt": "signals",
    "kept": "snapshot",
    "lane": "ordered_queue",
    "late": "lazy_imports",
    "life": "DrawHistory",
    "line": "channel",
    "made": "factory",
    "marks": "used_parameters",
    "mute": "zero_weight",
    "notes": "mailbox",
    "noting": "collective_trace",
    "origin": "ResumePoint",
    "outer": "outer_optimizer",
    "pieces": "flat_parameters",
    "place": "position, location, snapshot or topology",
    "published": "LoggedMetrics",
    "record": "static_graph",
    "restricted": "classmethods",
    "results": "LogCollector",
    "settled": "early_cause",
    "shards": "shard_layout",
    "staging": "shared_buffer",
    "stepping": "shard_step",
    "watch": "hang_monitor",
}
ALLOWED = {
    # what holds the ConsensusFlags: the word for what ranks do is the field's
    ("ground/agreement.py", "agreement"),
}


def words_of(name: str) -> list[str]:
    """The words of a name: ``HangMonitor``, ``hang_monitor`` and ``_HANG_MONITOR`` are hang, monitor."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_").split("_")


def names_in(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line and name of whatever a file names itself, and whether it is a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False


def breaches(sources: Sources) -> Iterator[str]:
    for source in sources.values():
        path = "/".join(source.path.parts[1:])
        concepts = [(0, part.removesuffix(".py"), True) for part in source.path.parts[1:]]
        for line, name, is_concept in [*concepts, *names_in(source.tree)]:
            words = words_of(name)
            found = next((word for word in NOWHERE if f"_{word}_" in f"_{'_'.join(words)}_"), None)
            if found is None and is_concept and len(words) == 1 and words[0] in NO_CONCEPT:
                found = words[0]
            if found is not None and (path, name) not in ALLOWED:
                better = NOWHERE.get(found) or NO_CONCEPT[found]
                yield f"{source.path}:{line} {name}: the word for it is {better}, not {found}"


def test_words_that_were_given_up_do_not_come_back() -> None:
    found = list(breaches(house()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("launch/heed.py", "", "launch/heed.py:0 heed: the word for it is signals"),
        ("loop/fit.py", "class Fit:\n    def _heed(self): ...", "loop/fit.py:2 _heed: the word for it is signals"),
        ("loop/fit.py", "def f(handover_of): ...", "fit.py:1 handover_of: the word for it is spawn_results"),
        ("loop/fit.py", "LOOKOUT_SECONDS = 1", "LOOKOUT_SECONDS: the word for it is hang_monitor"),
        ("loop/fit.py", "async def f():\n    a.put_up = 1", "fit.py:2 put_up: the word for it is install"),
        ("loop/fit.py", "class FirstSight: ...", "FirstSight: the word for it is RankSnapshot"),
        ("data/fit.py", "class _Draft: ...", "_Draft: the word for it is SourceSpec"),
        ("strategies/apart.py", "", "apart: the word for it is diverged_weights"),
        ("notes/fit.py", "", "notes: the word for it is mailbox"),
    ],
)
def test_one_that_comes_back_is_caught(file: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "lockstep" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (found,) = breaches(read(tmp_path / "lockstep"))
    assert said in found


def test_ordinary_uses_pass(tmp_path: Path) -> None:
    path = tmp_path / "lockstep" / "loop" / "command_line.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "class LatePlaces: ...\nfor line in lines: made, late = line, kept(results)\nheed(unheeded=1)\ninsight = 2"
    )
    assert list(breaches(read(tmp_path / "lockstep"))) == []
